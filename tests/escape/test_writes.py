"""Nothing inside writes outside its two small tmpfs, and filling those hurts nobody else."""

import os
from pathlib import Path

import pytest

from tests.escape.outside import every_target, outside, with_values

EVERYWHERE = """
import os
def attempt(folder, depth):
    path = os.path.join(folder, name)
    try:
        open(path, 'w').write('was here')
        print(path)
    except OSError:
        pass
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if depth and entry.is_dir(follow_symlinks=False):
            attempt(entry.path, depth - 1)
attempt(start, depth)
print('end')
"""

TOGGLE = """
for path in paths:
    try:
        text = open(path).read()
        with open(path, 'w') as file:
            file.write(text)
        print(path)
    except OSError:
        pass
print('end')
"""

THROUGH_LINK = """
import os
os.symlink(path, 'link')
try:
    open('link', 'w').write('changed')
    print('written')
except OSError as error:
    print(type(error).__name__)
"""

MOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(what, status):
    print(what, 'done' if status == 0 else os.strerror(ctypes.get_errno()))
uid, gid = os.getuid(), os.getgid()
call('unshare', libc.unshare(0x10020000))
try:
    for name, text in (('setgroups', 'deny'), ('uid_map', f'0 {uid} 1'), ('gid_map', f'0 {gid} 1')):
        open('/proc/self/' + name, 'w').write(text)
except OSError:
    print('no map')
os.mkdir('place')
call('mount', libc.mount(b'tmpfs', b'place', b'tmpfs', 0, b'size=1g'))
call('bind', libc.mount(b'/', b'place', None, 0x1000 | 0x4000, None))
call('private', libc.mount(None, b'/', None, 0x4000 | 0x40000, None))
call('umount', libc.umount2(b'place', 2))
call('chroot', libc.chroot(b'.'))
"""

REMOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for folder in folders:
    status = libc.mount(None, folder.encode(), None, 0x20 | 0x1000, b'')
    print(folder, status, libc.umount2(folder.encode(), 2))
try:
    open(folders[0] + '/escaped', 'w')
    print('written')
except OSError as error:
    print(type(error).__name__)
"""

READ_ONLY_MOUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
place = folders[0].encode()
assert libc.unshare(0x20000) == 0
for source, folder, flags in ((None, b'/', 0x44000), (place, place, 0x1000)):
    assert libc.mount(source, folder, None, flags, None) == 0
assert libc.mount(None, place, None, 0x1021, None) == 0
"""

JOIN = """
import ctypes, glob, os
libc = ctypes.CDLL(None, use_errno=True)
joined = 0
for path in [*paths, *glob.glob('/proc/[0-9]*/ns/mnt'), *glob.glob('/proc/[0-9]*/ns/user')]:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    joined += libc.setns(fd, 0) == 0
    os.close(fd)
print(joined)
"""


@every_target
async def test_no_folder_of_the_host_can_be_written(target, tmp_path, marker):
    code = with_values(EVERYWHERE, name=marker, start=str(tmp_path), depth=1)
    assert outside(code, tmp_path).splitlines() == [f"{tmp_path}/{marker}", "end"]
    (tmp_path / marker).unlink()
    everywhere = with_values(EVERYWHERE, name=marker, start="/", depth=3)
    lines = (await target.attack(everywhere)).output.splitlines()
    assert lines[-1] == "end"
    writable = {str(Path(line).parent) for line in lines[:-1]}
    assert all(
        f"{folder}/".startswith(("/tmp/", "/dev/shm/", "/workspace/")) for folder in writable
    ), writable
    for folder in (*writable, str(tmp_path)):
        assert not Path(folder, marker).exists()


async def test_no_setting_of_the_kernel_can_be_written(target, tmp_path):
    names = ("core_pattern", "hostname", "panic", "ns_last_pid", "randomize_va_space")
    paths = [f"/proc/sys/kernel/{name}" for name in names]
    paths += ["/proc/sys/vm/swappiness", "/proc/sys/user/max_user_namespaces"]
    code = with_values(TOGGLE, paths=paths)
    if os.getuid() == 0:
        assert "/proc/sys/kernel/core_pattern" in outside(code, tmp_path)
    assert (await target.attack(code)).output == "end"


async def test_a_file_cannot_be_written_through_a_link(target, tmp_path):
    path = tmp_path / "file"
    path.write_text("as it was", encoding="ascii")
    path.chmod(0o666)
    code = with_values(THROUGH_LINK, path=str(path))
    work = tmp_path / "work"
    work.mkdir()
    assert outside(code, work) == "written"
    path.write_text("as it was", encoding="ascii")
    assert (await target.attack(code)).output in ("FileNotFoundError", "PermissionError")
    assert path.read_text(encoding="ascii") == "as it was"


async def test_nothing_can_be_mounted(target, tmp_path):
    free = dict(line.split(" ", 1) for line in outside(MOUNT, tmp_path).splitlines())
    assert [name for name, said in free.items() if said == "done"] == [*free]
    lines = (await target.attack(MOUNT)).output.splitlines()
    held = dict(line.split(" ", 1) for line in lines if line != "no map")
    assert set(held.values()) == {"Operation not permitted"}, held


async def test_mounts_of_the_sandbox_cannot_be_changed(target, tmp_path):
    if os.getuid() == 0:  # in a mount namespace that ends with the attack
        place = with_values(READ_ONLY_MOUNT + REMOUNT, folders=[str(tmp_path)])
        assert outside(place, tmp_path).splitlines() == [f"{tmp_path} 0 0", "written"]
    folders = ["/usr", "/", "/dev", "/proc", "/tmp", "/sandbox/interpreter.py"]
    result = await target.attack(with_values(REMOUNT, folders=folders))
    *lines, last = result.output.splitlines()
    assert {line.split(" ", 1)[1] for line in lines} == {"-1 -1"}
    assert last in ("OSError", "PermissionError")


async def test_no_namespace_can_be_joined(target, tmp_path):
    own = with_values(JOIN, paths=["/proc/self/ns/ipc"])
    if os.getuid() == 0:
        assert int(outside(own, tmp_path)) > 0
    kinds = ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup", "pid_for_children")
    paths = [f"/proc/{pid}/ns/{kind}" for pid in ("self", 1) for kind in kinds]
    assert (await target.attack(with_values(JOIN, paths=paths))).output == "0"


MANY_FILES = """
import itertools, os
made = 0
try:
    for folder in folders:
        for i in itertools.count() if count is None else range(count):
            os.close(os.open(f'{folder}/{prefix}{i}', os.O_CREAT | os.O_WRONLY))
            made += 1
except OSError as error:
    print(error.strerror)
print(made)
"""

MANY_BYTES = """
import itertools
written = 0
try:
    for i in itertools.count() if count is None else range(count):
        with open(f'{folder}/{prefix}{i}', 'wb') as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
                file.flush()
                written += 1
except OSError as error:
    print(error.strerror)
print(written)
"""

CLEAN = """
import glob, os
for path in glob.glob('/tmp/full*') + glob.glob('/dev/shm/full*'):
    os.unlink(path)
"""


@pytest.mark.parametrize(
    "place",
    ["/tmp", pytest.param("/dev/shm", marks=pytest.mark.extended)],
    ids=["tmp", "dev-shm"],
)
async def test_taking_all_inodes_harms_nobody(target, tmp_path, place):
    bounded = with_values(MANY_FILES, folders=[str(tmp_path)], count=5000, prefix="full")
    assert outside(bounded, tmp_path) == "5000"
    code = with_values(MANY_FILES, folders=[place], count=None, prefix="full")
    said, made = (await target.attack(code)).output.splitlines()
    assert said in ("No space left on device", "Read-only file system", "Permission denied")
    assert int(made) < target.num_files
    await others_write(target)
    await target.attack(CLEAN)


@pytest.mark.parametrize(
    "place",
    ["/tmp", pytest.param("/dev/shm", marks=pytest.mark.extended)],
    ids=["tmp", "dev-shm"],
)
async def test_taking_all_space_harms_nobody(target, tmp_path, place):
    bounded = with_values(MANY_BYTES, folder=str(tmp_path), count=20, prefix="full")
    assert outside(bounded, tmp_path) == "160"
    code = with_values(MANY_BYTES, folder=place, count=None, prefix="full")
    said, written = (await target.attack(code)).output.splitlines()
    assert said in ("No space left on device", "Read-only file system", "Permission denied")
    assert int(written) < 160  # MiB, of which 64 are the largest file
    await others_write(target)
    await target.attack(CLEAN)


async def others_write(target):
    """A call that is not the attacker's has room, while the attacker's files are there."""
    write = "open('/tmp/a', 'w').write('x' * 10**6); print(len(open('/tmp/a').read()))"
    assert (await target.pool.run(write)).output == "1000000"

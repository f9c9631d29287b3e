"""Nothing inside reads a file of the host or the environment of the launcher."""

import ctypes
import os
import stat
from pathlib import Path

import pytest

from tests.escape.outside import every_target, outside, with_values

READ = """
import glob
found = []
for path in [path, *glob.glob('/proc/[0-9]*/root' + path), *glob.glob('/proc/[0-9]*/cwd/secret')]:
    try:
        found.append(open(path).read())
    except OSError:
        pass
print(found[0] if found else 'nothing')
"""

BY_LINK = """
import os
os.symlink(path, 'link')
os.symlink('/proc/self/root' + path, 'other')
os.mkdir('folder')
os.symlink(os.path.dirname(path), 'folder/up')
names = ['link', 'other', 'folder/up/' + os.path.basename(path)]
found = []
for name in names:
    try:
        found.append(open(name).read())
    except OSError as error:
        found.append(type(error).__name__)
print(*found)
"""

BY_HANDLE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(handle, 256)
place = os.open('.', os.O_RDONLY)
fd = libc.open_by_handle_at(place, buffer, os.O_RDONLY)
print(os.read(fd, 100).decode() if fd >= 0 else os.strerror(ctypes.get_errno()))
"""

ENVIRONMENT = """
import glob, os
found = []
for path in ['/proc/%d/environ' % os.getppid(), *glob.glob('/proc/[0-9]*/environ')]:
    try:
        found += open(path, errors='replace').read().split('\\0')
    except OSError:
        pass
found += [f'{name}={value}' for name, value in os.environ.items()]
print(*sorted({entry.split('=')[0] for entry in found} - {''}), 'end')
print(any(value in entry for entry in found))
"""

INNER_NAMES = {
    *("PATH", "HOME", "LANG", "PWD", "LC_CTYPE", "JE_ARROW_MALLOC_CONF"),
    *("TERM", "PAGER", "SHLVL", "OLDPWD", "_"),  # of a shell
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
}


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("the secret", encoding="ascii")
    path.chmod(0o644)
    return path


@every_target
async def test_a_file_cannot_be_read(target, secret):
    code = with_values(READ, path=str(secret))
    assert outside(code, secret.parent) == "the secret"
    assert (await target.attack(code)).output == "nothing"


async def test_a_file_cannot_be_read_through_links(target, secret, tmp_path):
    code = with_values(BY_LINK, path=str(secret))
    work = tmp_path / "work"
    work.mkdir()
    assert outside(code, work) == "the secret the secret the secret"
    result = await target.attack(code)
    assert set(result.output.split()) <= {"FileNotFoundError", "PermissionError"}
    # A later call, and the copying of a fork, must not follow them either.
    assert "secret" not in (await target.attack("print(open('link').read())")).output


async def test_a_file_cannot_be_opened_by_handle(target, secret):
    if os.getuid():
        pytest.skip("opening by handle takes root outside too")
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer(256)
    handle[:4] = (128).to_bytes(4, "little")
    mount = ctypes.c_int()
    status = libc.name_to_handle_at(
        -100, str(secret).encode(), handle, ctypes.byref(mount), ctypes.c_int(0)
    )
    if status:
        pytest.skip("a file system without handles")
    code = with_values(BY_HANDLE, handle=handle.raw)
    assert outside(code, secret.parent) == "the secret"
    assert (await target.attack(code)).output == "Operation not permitted"


@every_target
async def test_the_environment_of_the_parent_cannot_be_read(target, tmp_path):
    # What this process was started with: `os.environ` may be newer.
    entries = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    foreign = [entry for entry in entries if entry.partition("=")[0] not in {*INNER_NAMES, ""}]
    value = max(foreign, key=len)
    code = with_values(ENVIRONMENT, value=value)
    assert outside(code, tmp_path).endswith("end\nTrue")
    names, found = (await target.attack(code)).output.splitlines()
    assert found == "False"
    assert set(names.split()) - {"end"} <= INNER_NAMES


LOOK = """
import os
def walk(folder, depth):
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        name = entry.path
        if entry.is_dir(follow_symlinks=False) and depth and not name.startswith(skipped):
            walk(name, depth - 1)
        elif name.startswith(wanted):
            print(name)
walk('/', 3)
print('end')
"""


async def test_settings_and_homes_of_the_host_cannot_be_seen(target, tmp_path):
    wanted = (
        "/etc/passwd",
        "/etc/shadow",
        "/etc/hosts",
        "/etc/resolv.conf",
        "/var",
        "/run",
        "/srv",
    )
    code = with_values(LOOK, wanted=wanted, skipped=("/proc", "/usr", "/sandbox", "/sys"))
    assert "/etc/passwd" in outside(code, tmp_path).splitlines()
    assert (await target.attack(code)).output == "end"


async def test_no_descriptor_of_the_host_is_open(target, tmp_path):
    code = (
        "import os\n"
        "for name in sorted(os.listdir('/proc/self/fd'), key=int):\n"
        "    try: print(name, os.readlink('/proc/self/fd/' + name).split(':')[0])\n"
        "    except FileNotFoundError: pass\n"
    )
    assert outside(code, tmp_path).splitlines()[0] == "0 /dev/null"
    lines = (await target.attack(code)).output.splitlines()
    kinds = [line.split()[1] for line in lines]
    assert set(kinds[:3]) <= {"/dev/null", "pipe"}
    # One more may be there, for the event that the call is done (see `test_forged_messages`).
    # The shell of a workspace has one for its state.
    assert kinds[3:] in ([], ["socket"], ["/memfd"])


async def test_devices_are_the_harmless_ones(target, tmp_path):
    code = (
        "import os, stat\n"
        "for folder, _, names in os.walk('/dev'):\n"
        "    for name in names:\n"
        "        mode = os.lstat(os.path.join(folder, name)).st_mode\n"
        "        if stat.S_ISBLK(mode) or stat.S_ISCHR(mode): print(name)\n"
        "print('end')"
    )
    disks = {path.name for path in Path("/dev").iterdir() if stat.S_ISBLK(path.stat().st_mode)}
    assert disks <= set(outside(code, tmp_path).split())
    allowed = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console", "end"}
    assert set((await target.attack(code)).output.split()) <= allowed

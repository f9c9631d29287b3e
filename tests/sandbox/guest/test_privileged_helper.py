"""Copies of small trees, made and compared file by file; and what the helper answers."""

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.sandbox.guest.privileged_helper import copy_tree

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
NAMES = st.text("abcé. \n", min_size=1, max_size=5).filter(lambda name: name not in (".", ".."))
LEAVES = st.binary(max_size=20) | st.just(None) | st.text("ab/.", min_size=1, max_size=5)
TREES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def copy(source, target):
    ends = [os.open(folder, os.O_RDONLY) for folder in (source, target)]
    before = len(os.listdir("/proc/self/fd"))
    try:
        copy_tree(*ends)
    finally:
        assert len(os.listdir("/proc/self/fd")) <= before
        for fd in ends:
            os.close(fd)


def grow(folder, tree, modes):
    """bytes: a file, text: a link, None: a pipe, dict: a folder."""
    for name, what in tree.items():
        path = folder / name
        if isinstance(what, dict):
            path.mkdir()
            grow(path, what, modes)
        elif isinstance(what, bytes):
            path.write_bytes(what)
        elif isinstance(what, str):
            path.symlink_to(what)
            continue
        else:
            os.mkfifo(path)
        path.chmod(modes[len(name) % len(modes)])
        os.utime(path, ns=(10**9 + 7, 10**18 + 123_456_789))


def picture(folder):
    """Everything below, in words that can be compared."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        about = [oct(info.st_mode), info.st_mtime_ns]
        if path.is_symlink():
            about.append(os.readlink(path))
        elif path.is_file():
            about.append(path.read_bytes())
        found[str(path.relative_to(folder))] = about
    return found


@settings(max_examples=40)
@given(TREES, st.lists(st.sampled_from([0o700, 0o755, 0o1777, 0o6750, 0o600 | 0o100]), min_size=1))
def test_a_copy_looks_the_same(tree, modes):
    with tempfile.TemporaryDirectory() as parent:
        source, target = Path(parent, "source"), Path(parent, "target")
        source.mkdir()
        target.mkdir()
        grow(source, tree, modes)
        source.chmod(0o711)
        os.utime(source, ns=(3, 5))
        copy(source, target)
        assert picture(target) == picture(source)
        about = target.stat()
        assert (stat.S_IMODE(about.st_mode), about.st_mtime_ns) == (0o711, 5)


@pytest.fixture
def pair(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    return source, target


def test_later_writes_are_separate_and_hard_links_are_split(pair):
    source, target = pair
    (source / "a").write_bytes(b"old")
    os.link(source / "a", source / "b")
    copy(source, target)
    (source / "a").write_bytes(b"new")
    assert (target / "a").read_bytes() == (target / "b").read_bytes() == b"old"
    assert (target / "a").stat().st_nlink == 1


def test_links_are_not_followed(pair, tmp_path):
    source, target = pair
    (tmp_path / "secret").write_text("s", encoding="ascii")
    (source / "file").symlink_to(tmp_path / "secret")
    (source / "folder").symlink_to(tmp_path)
    (source / "nowhere").symlink_to("nowhere")
    copy(source, target)
    assert {path.name for path in target.iterdir() if path.is_symlink()} == {
        "file",
        "folder",
        "nowhere",
    }


def test_sockets_are_left_out(pair):
    source, target = pair
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(source)
        try:
            one.bind("s")
        finally:
            os.chdir(ROOT)
    (source / "z").touch()
    copy(source, target)
    assert [path.name for path in target.iterdir()] == ["z"]


def test_holes_stay_holes(pair):
    source, target = pair
    with (source / "hole").open("wb") as file:
        file.seek(8 * MIB)
        file.write(b"middle")
        file.truncate(64 * MIB)
    (source / "only").touch()
    os.truncate(source / "only", 32 * MIB)
    with (source / "hole").open("rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0:
            pytest.skip("a file system that keeps no holes")
    copy(source, target)
    assert (target / "hole").stat().st_size == 64 * MIB
    assert (target / "hole").stat().st_blocks * 512 <= MIB
    with (target / "hole").open("rb") as file:
        file.seek(8 * MIB - 2)
        assert file.read(10) == b"\0\0middle\0\0"
    only = (target / "only").stat()
    assert (only.st_size, only.st_blocks) == (32 * MIB, 0)


def test_depth_is_bounded(pair):
    source, target = pair
    deep, folder = source / "deep", os.open(source, os.O_RDONLY)
    for _ in range(128):
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    (deep / "note").write_text("here", encoding="ascii")
    copy(source, target)
    assert (target / "deep" / "note").read_text(encoding="ascii") == "here"
    assert picture(target) == picture(source)
    for _ in range(1000):
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    other = target / "other"
    other.mkdir()
    with pytest.raises(OSError) as refused:
        copy(source, other)
    assert refused.value.errno == errno.ELOOP
    subprocess.run(["rm", "-rf", str(source)], check=True, timeout=120)  # too deep for pytest


IN_NAMESPACE = (
    "import json, os, sys, tempfile\n"
    "from mega_agentrl.sandbox.guest import syscalls\n"
    "from mega_agentrl.sandbox.guest.privileged_helper import copy_tree\n"
    "try: pid = syscalls.clone(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)\n"
    "except OSError: sys.exit(9)\n"
    "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    "source = tempfile.mkdtemp(dir='/dev/shm'); target = sys.argv[1]\n"
    "try: syscalls.map_own_ids(); syscalls.mount('tmpfs', target, 0, 'size=1m,nr_inodes=20')\n"
    "except OSError: os._exit(9)\n"
    "answers = []\n"
    "def attempt():\n"
    "    try: copy_tree(os.open(source, 0), os.open(target, 0)); answers.append(0)\n"
    "    except OSError as error: answers.append(error.errno)\n"
    "def fill(name, text): open(f'{source}/{name}', 'wb').write(text)\n"
    "fill('a', b'x' * 900_000); attempt(); os.remove(f'{target}/a')\n"
    "fill('b', b'x' * 900_000); attempt()\n"
    "for name in 'ab': os.remove(f'{source}/{name}')\n"
    "for number in range(30): fill(f'n{number}', b'')\n"
    "attempt()\n"
    "import shutil; shutil.rmtree(source); print(json.dumps(answers), flush=True); os._exit(0)\n"
)

HELPER = (
    "import json, os, time\n"
    "from mega_agentrl.sandbox.guest import privileged_helper\n"
    "from mega_agentrl.sandbox.guest.settings import GuestSettings\n"
    "errors = []\n"
    "def attempt(pid, deadline):\n"
    "    try: privileged_helper.set_up_fork(GuestSettings(), pid, os.getpid(), deadline=deadline)\n"
    "    except OSError as error: errors.append([type(error).__name__, str(error)])\n"
    "attempt(2**30, time.monotonic() + 60)\n"
    "privileged_helper._set_up_fork = lambda *a: time.sleep(60)\n"
    "attempt(2**30, time.monotonic() + 0.2)\n"
    "try: os.waitpid(-1, 0)\n"
    "except ChildProcessError: errors.append(len(os.listdir('/proc/self/fd')))\n"
    "print(json.dumps(errors))"
)


def run(code, *arguments):
    command = [sys.executable, "-B", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_copying_into_too_small_a_target_fails(tmp_path):
    done = run(IN_NAMESPACE, str(tmp_path))
    if done.returncode == 9:
        pytest.skip("user namespaces are not to be had here")
    assert json.loads(done.stdout) == [0, errno.ENOSPC, errno.ENOSPC], done.stderr


def test_a_helper_that_fails_or_is_late_raises_and_has_ended():
    done = run(HELPER)
    failed, late, num_fds = json.loads(done.stdout)
    assert failed[0] == "OSError"
    assert "FileNotFoundError" in failed[1]
    assert late[0] == "TimeoutError"
    assert num_fds == 4  # three streams, and the folder being listed

"""Control groups: limits that bind, nothing left behind, and version 2 on a fake tree."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.sandbox import cgroup
from mega_agentrl.sandbox.cgroup import create_cgroup, remove_stale_cgroups


@pytest.fixture
def group():
    made = create_cgroup(memory_mib=64, num_processes=5)
    if not made.procs_files:
        pytest.skip("no control group can be written here")
    yield made
    made.close()


def test_limits_bind_and_the_group_goes(group):
    # Their output goes elsewhere: nobody waits for the end of those that were started.
    script = "read go; for i in 1 2 3 4 5 6 7 8; do sleep 60 >/dev/null 2>&1 & done"
    command = ["/bin/sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        group.add(child.pid)
        _, error = child.communicate(b"go\n", timeout=120)
    assert b"fork" in error
    folders = [Path(entrance).parent for entrance in group.procs_files]
    for entrance in group.procs_files:
        for pid in Path(entrance).read_text(encoding="ascii").split():
            os.kill(int(pid), 9)
    group.close()
    group.close()
    assert not any(folder.exists() for folder in folders)


def test_processes_killed_for_memory_are_counted(group):
    if not group.limits_memory:
        pytest.skip("no control group limits memory here")
    assert group.num_oom_kills == 0
    script = "read go; exec dd if=/dev/zero of=/dev/null bs=100M count=1"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE) as child:
        group.add(child.pid)
        child.communicate(b"go\n", timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert group.num_oom_kills == 1


FILL_SOCKETS = """
import socket
input()
server, ends, number = socket.create_server(('127.0.0.1', 0), backlog=200), [], 0
for _ in range(150):
    one = socket.create_connection(server.getsockname())
    ends += [one, server.accept()[0]]
    one.setblocking(False)
    try:
        while True:
            number += one.send(bytes(1 << 16))
    except BlockingIOError:
        pass
print(number >> 20)
"""


def test_buffers_of_sockets_are_part_of_the_memory_limit(group):
    if not group.limits_memory:
        pytest.skip("no control group limits memory here")
    filled = []
    for joins in (False, True):
        command = [sys.executable, "-I", "-c", FILL_SOCKETS]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as child:
            if joins:
                group.add(child.pid)
            filled.append(int(child.communicate(b"\n", timeout=120)[0] or 0))
    without, within = filled
    assert within <= 32 < 64 < without, filled


def test_a_group_whose_last_process_ends_late_goes_with_the_next(group, monkeypatch):
    monkeypatch.setattr(cgroup, "_REMOVE_DEADLINE_S", 0.0)
    folders = [Path(entrance).parent for entrance in group.procs_files]
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        group.add(child.pid)
        group.close()
        create_cgroup(memory_mib=64, num_processes=5).close()
        assert all(folder.exists() for folder in folders)
        child.kill()
    create_cgroup(memory_mib=64, num_processes=5).close()
    assert not any(folder.exists() for folder in folders)


def test_adding_a_process_that_is_not_moved_fails(tmp_path):
    (tmp_path / "cgroup.procs").symlink_to(os.devnull)  # takes every id and has none
    with pytest.raises(ProcessLookupError):
        cgroup.Cgroup([tmp_path]).add(os.getpid())


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(group):
    own = Path(group.procs_files[0]).parent
    namespace = own.name.split("-")[1]
    dead = own.parent / f"mega_agentrl-{namespace}-4000000-1-0"
    dead.mkdir()
    remove_stale_cgroups()
    assert not dead.exists()
    assert own.exists()


def test_a_launcher_of_another_pid_namespace_leaves_the_group(group):
    """There, the process of this id is another one or none, as in a second job's container."""
    code = "from mega_agentrl.sandbox import cgroup; cgroup.remove_stale_cgroups()"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    if subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make PID namespaces")
    subprocess.run(command, check=True, timeout=120)
    assert Path(group.procs_files[0]).exists()


def test_version_2_of_control_groups_is_preferred(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("memory pids", encoding="ascii")
    real_mkdir = Path.mkdir

    def mkdir(path, *rest, **more):  # as the kernel: a new folder has its files
        real_mkdir(path, *rest, **more)
        for name in ("memory.max", "pids.max", "memory.swap.max", "cgroup.procs"):
            (path / name).touch()
        (path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n", encoding="ascii")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    made = create_cgroup(memory_mib=3, num_processes=9)
    (entrance,) = made.procs_files
    folder = Path(entrance).parent
    assert folder.parent == tmp_path
    assert (folder / "memory.max").read_text(encoding="ascii") == str(3 << 20)
    assert (folder / "pids.max").read_text(encoding="ascii") == "9"
    assert made.num_oom_kills == 3


def test_where_nothing_can_be_written_there_is_no_group(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "none")
    made = create_cgroup(memory_mib=3, num_processes=9)
    assert made.procs_files == []
    made.close()

"""Memory of the run's processes and its limits, from files as the kernel writes them."""

import os
import signal
import subprocess
import sys

import pytest

from mega_agentrl.runtime.process_memory import MemoryLimits, read_processes, sum_by_name
from mega_agentrl.sandbox.cgroup import create_cgroup

GIB = 2**30
HOG = (
    "import sys; sys.stdin.readline(); blocks = [bytearray(1 << 20) for _ in range(4096)]; "
    "print(len(blocks))"
)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path):
    """A function that adds a process to a folder that stands for `/proc`."""
    (tmp_path / "logs").mkdir()

    def add(pid, parent, mib, output="/dev/null", command="python"):
        folder = tmp_path / "proc" / str(pid)
        status = f"Name:\tpython\nPPid:\t{parent}\nRssAnon:\t{mib * 512} kB\n"
        write(folder / "status", f"{status}RssFile:\t999999 kB\nRssShmem:\t{mib * 512} kB\n")
        write(folder / "cmdline", command)
        (folder / "fd").mkdir()
        (folder / "fd" / "1").symlink_to(output)

    return add


def test_processes_are_named_by_their_log_file_or_by_their_ancestors(proc, tmp_path):
    logs = tmp_path / "logs"
    proc(1, 0, 1)
    proc(10, 1, 100)  # the driver
    proc(11, 10, 20, command="/env/ray/core/raylet")
    proc(12, 11, 300, logs / "policy-rank0.log")
    proc(13, 11, 40, logs / "engine0.log")
    proc(14, 13, 500)  # vLLM's core, which writes to a pipe
    proc(15, 11, 3)  # an idle worker of Ray
    proc(16, 10, 2, command="bwrap")
    proc(17, 16, 60)
    proc(18, 11, 9, logs / "sandbox-host0.log")
    proc(19, 18, 70)
    proc(20, 1, 5000, tmp_path / "other" / "logs" / "engine1.log")
    write(tmp_path / "proc" / "21" / "status", "Name:\tkthreadd\nPPid:\t0\n")
    write(tmp_path / "proc" / "meminfo", "")
    found = read_processes(logs, 10, tmp_path / "proc")
    assert {name: size >> 20 for name, size in sum_by_name(found.values()).items()} == {
        "engine0": 540,
        "policy-rank0": 300,
        "sandboxes": 132,
        "driver": 100,
        "ray": 23,
        "sandbox-host0": 9,
    }
    assert sorted(read_processes(logs, None, tmp_path / "proc")) == [12, 13, 14, 18, 19]


def test_this_process_and_its_children_are_found(tmp_path):
    with open(tmp_path / "rank0.log", "w") as log:
        child = subprocess.Popen(["sleep", "300"], stdout=log)
    try:
        found = read_processes(tmp_path, os.getpid())
        assert (found[os.getpid()].name, found[child.pid].name) == ("driver", "rank0")
        assert found[os.getpid()].resident_bytes > 2**20
    finally:
        child.kill()
        child.wait()


def machine(root, *, cgroup, available_gib=8):
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable: {available_gib << 20} kB\n"
    write(root / "proc" / "meminfo", meminfo)
    write(root / "proc" / "self" / "cgroup", cgroup)
    write(root / "proc" / "vmstat", "nr_free_pages 5\noom_kill 3\nnuma_hit 1\n")


def test_fullest_of_machine_and_control_groups_counts(tmp_path):
    machine(tmp_path, cgroup="0::/slice/job\n")
    assert MemoryLimits(tmp_path).read().owner == "machine"
    assert MemoryLimits(tmp_path).read().fraction == 0.5
    groups = tmp_path / "sys" / "fs" / "cgroup"
    write(groups / "slice" / "job" / "memory.max", "max\n")
    write(groups / "slice" / "memory.max", f"{4 * GIB}\n")
    write(groups / "slice" / "memory.current", f"{4 * GIB}\n")
    write(groups / "slice" / "memory.stat", f"anon 1\ninactive_file {GIB}\n")
    use = MemoryLimits(tmp_path).read()
    assert (use.owner, use.used_bytes, use.limit_bytes) == ("control group", 3 * GIB, 4 * GIB)
    assert MemoryLimits(tmp_path).count_kills() == 3


@pytest.mark.parametrize("path", ["/job", "/docker/0123"], ids=["own path", "path of the host"])
def test_limits_of_control_groups_of_version_1_are_read(tmp_path, path):
    machine(tmp_path, cgroup=f"4:cpu,memory:{path}\n0::/\n", available_gib=15)
    top = tmp_path / "sys" / "fs" / "cgroup" / "memory"
    folder = top / "job" if path == "/job" else top
    write(top / "memory.limit_in_bytes", "9223372036854771712\n")
    write(folder / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{2 * GIB}\n")
    write(folder / "memory.stat", f"cache 1\ntotal_inactive_file {GIB}\n")
    use = MemoryLimits(tmp_path).read()
    assert (use.owner, use.fraction) == ("control group", 0.5)


def test_kernel_counts_a_process_that_it_kills_at_the_limit_of_its_group():
    group = create_cgroup(memory_mib=64, num_processes=16)
    if not group.limits_memory:
        pytest.skip("control groups cannot be made here")
    try:
        before = MemoryLimits().count_kills()
        command = [sys.executable, "-I", "-S", "-c", HOG]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as hog:
            group.add(hog.pid)
            hog.communicate(b"\n")
        assert hog.returncode == -signal.SIGKILL
        assert MemoryLimits().count_kills() > before
    finally:
        group.close()

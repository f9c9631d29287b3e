"""Limits of memory and how full they are, from files as the kernel writes them."""

import signal
import subprocess
import sys

import pytest

from mega_agentrl.estimate.memory_limits import MemoryLimits
from mega_agentrl.sandbox.cgroup import create_cgroup

GIB = 2**30
HOG = (
    "import sys; sys.stdin.readline(); blocks = [bytearray(1 << 20) for _ in range(4096)]; "
    "print(len(blocks))"
)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root, *, cgroup, available_gib=8):
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable: {available_gib << 20} kB\n"
    write(root / "proc" / "meminfo", meminfo)
    write(root / "proc" / "self" / "cgroup", cgroup)
    write(root / "proc" / "vmstat", "nr_free_pages 5\noom_kill 3\nnuma_hit 1\n")


def test_fullest_of_machine_and_control_groups_counts(tmp_path):
    machine(tmp_path, cgroup="0::/slice/job\n")
    assert MemoryLimits(tmp_path).read().owner == "machine"
    assert MemoryLimits(tmp_path).read().fraction == 0.5
    assert MemoryLimits(tmp_path).smallest_bytes() == 16 * GIB
    groups = tmp_path / "sys" / "fs" / "cgroup"
    write(groups / "slice" / "job" / "memory.max", "max\n")
    write(groups / "slice" / "memory.max", f"{4 * GIB}\n")
    write(groups / "slice" / "memory.current", f"{4 * GIB}\n")
    write(groups / "slice" / "memory.stat", f"anon 1\ninactive_file {GIB}\n")
    use = MemoryLimits(tmp_path).read()
    assert (use.owner, use.used_bytes, use.limit_bytes) == ("control group", 3 * GIB, 4 * GIB)
    assert MemoryLimits(tmp_path).smallest_bytes() == 4 * GIB
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

"""Memory of the run's processes, from files as the kernel writes them."""

import os
import subprocess

import pytest

from mega_agentrl.runtime.process_memory import read_processes, sum_by_name


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

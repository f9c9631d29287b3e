"""One line says that memory is nearly full, or what was killed for it; no line comes twice."""

import queue
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.estimate.memory_limits import MemoryUse
from mega_agentrl.runtime import memory_watch
from mega_agentrl.runtime.memory_watch import (
    NUM_LOOKS_AFTER_KILL,
    SANDBOX_LINE_INTERVAL_S,
    SCAN_INTERVAL_S,
    LimitAlarm,
    MemoryWatch,
    what_to_lower,
)
from mega_agentrl.runtime.process_memory import RunProcess

GIB = 2**30


class Machine:
    """A machine whose memory, processes and clock the test sets."""

    def __init__(self):
        self.used, self.num_kills, self.now_s, self.num_scans = 5, 7, 0.0, 0
        self.sizes = {1: ("driver", 1), 2: ("policy-rank0", 2), 3: ("engine0", 3)}
        self.sizes |= {4: ("sandboxes", 1)}
        self.deaths = queue.SimpleQueue()
        clock = {"read": self.scan, "clock": lambda: self.now_s, "deaths": self.deaths}
        self.watch = MemoryWatch(Path("logs"), driver_pid=1, limits=self, **clock)

    def read(self):
        return MemoryUse("machine", self.used * GIB, 10 * GIB)

    def count_kills(self):
        return self.num_kills

    def scan(self, log_folder, driver_pid):
        self.num_scans += 1
        return {
            pid: RunProcess(pid=pid, name=name, resident_bytes=size * GIB)
            for pid, (name, size) in self.sizes.items()
        }

    def look(self, *ray_kills, after_s=1.0):
        self.now_s += after_s
        return self.watch.check(ray_kills)


@pytest.fixture
def machine():
    made = Machine()
    assert made.look() == []
    return made


def test_alarm_comes_once_until_the_share_has_clearly_fallen():
    alarm = LimitAlarm(0.8, 0.6)
    shares = [0.7, 0.8, 0.9, 0.7, 0.9, 0.5, 0.9]
    assert [alarm.check(share) for share in shares] == [0, 1, 0, 0, 0, 0, 1]


def test_nearly_full_memory_is_one_line_with_the_use_of_each_process(machine):
    machine.used = 9
    (line,) = machine.look()
    assert "9.0 of 10.0 GiB (90%) of this machine" in line
    assert "engine0 3.00 GiB, policy-rank0 2.00 GiB, driver 1.00 GiB, sandboxes 1.00 GiB" in line
    assert "Lower engine.cpu_kv_cache_gib or engine.max_num_seqs. " in line
    assert machine.look() == []
    assert machine.watch.fraction == 0.9


def test_process_killed_by_the_kernel_is_named_with_the_use_before(machine):
    machine.num_kills += 1
    assert machine.look() == [], "it is still returning its memory"
    del machine.sizes[3]
    (line,) = machine.look()
    assert "killed by the kernel for lack of memory" in line
    assert "such kills: engine0 3.00 GiB. Lower engine." in line
    assert "engine0 3.00 GiB, policy-rank0 2.00 GiB, driver" in line
    assert machine.watch.num_kills == 1
    assert [machine.look() for _ in range(10)] == [[]] * 10


def test_ranks_that_the_run_ends_after_a_kill_are_not_named_as_killed(machine):
    machine.sizes[5] = ("policy-rank1", 2)
    machine.look(after_s=SCAN_INTERVAL_S)
    machine.num_kills += 1
    machine.deaths.put("policy rank 1")
    del machine.sizes[2], machine.sizes[5]
    (line,) = machine.look()
    assert "such kills: policy-rank1 2.00 GiB. Lower" in line
    assert "policy-rank0 2.00 GiB, policy-rank1 2.00 GiB" in line, "the use before"


@pytest.mark.parametrize(
    ("noticed", "num_kills", "named"),
    [
        pytest.param("critic rank 0", 1, "1 of ", id="one_of_them_if_no_death_was_noticed"),
        pytest.param("engine 0", 2, "", id="all_if_the_kernel_killed_as_many"),
    ],
)
def test_processes_that_are_gone_are_named_with_the_number_of_kills(
    machine, noticed, num_kills, named
):
    machine.deaths.put(noticed)
    machine.num_kills += num_kills
    del machine.sizes[2], machine.sizes[3]
    (line,) = machine.look()
    assert f"such kills: {named}engine0 3.00 GiB, policy-rank0 2.00 GiB. Lower" in line


@pytest.mark.parametrize(
    ("process", "log"),
    [
        ("engine 12", "engine12"),
        ("policy rank 3", "policy-rank3"),
        ("reward model rank 0", "reward-rank0"),
        ("sandbox host 1 (node 10.0.0.1, process 7)", "sandbox-host1"),
    ],
    ids=["engine", "policy", "reward", "sandboxes"],
)
def test_noticed_death_is_that_of_the_process_with_this_log(process, log, machine):
    machine.sizes |= {5: (log, 1), 6: ("critic-rank0", 9)}
    machine.look(after_s=SCAN_INTERVAL_S)
    machine.deaths.put(process)
    machine.num_kills += 1
    del machine.sizes[5], machine.sizes[6]
    (line,) = machine.look()
    assert f"such kills: {log} 1.00 GiB. Lower" in line


def test_a_line_names_the_largest_of_many_processes(machine):
    machine.sizes = {pid: (f"policy-rank{pid}", 100 - pid) for pid in range(20)}
    machine.used = 9
    (line,) = machine.look()
    assert "policy-rank7 93.00 GiB, 12 others 1038.00 GiB" in line
    assert "policy-rank8 " not in line


def test_process_that_ends_without_a_kill_is_no_line(machine):
    del machine.sizes[3]
    assert [machine.look(after_s=SCAN_INTERVAL_S + 1) for _ in range(3)] == [[]] * 3


def test_kills_in_sandboxes_are_one_line_from_time_to_time(machine):
    lines = []
    for number in range(3):
        machine.num_kills += 2
        machine.sizes.pop(4, None)
        for _ in range(NUM_LOOKS_AFTER_KILL):
            lines += machine.look()
        machine.sizes[4 + number] = ("sandboxes", 1)
    assert len(lines) == 1 and ": 2 of the machine's processes" in lines[0]
    machine.num_kills += 1
    machine.now_s += SANDBOX_LINE_INTERVAL_S
    lines = [line for _ in range(NUM_LOOKS_AFTER_KILL) for line in machine.look()]
    assert len(lines) == 1 and ": 5 of the machine's processes" in lines[0]
    assert machine.watch.num_kills == 7


def test_process_killed_by_rays_memory_monitor_is_one_line_however_many_calls_failed(machine):
    del machine.sizes[2]
    (line,) = machine.look("policy rank 0", "policy rank 0")
    assert "killed by Ray's memory monitor for lack of memory: policy rank 0." in line
    assert "policy-rank0 2.00 GiB" in line, "its use before"
    assert machine.look("policy rank 0") == []


def test_all_processes_are_looked_at_rarely_unless_memory_is_scarce(machine):
    assert [machine.look() for _ in range(8)] == [[]] * 8
    assert machine.num_scans == 1
    machine.used = 8
    assert [machine.look() for _ in range(3)] == [[]] * 3
    assert machine.num_scans == 4


@pytest.mark.parametrize("name", ["driver", "policy-rank3", "critic-rank0", "sandboxes", "ray"])
def test_what_to_lower_are_settings_that_exist(name):
    text = what_to_lower({name: 5, "engine0": 1})
    keys = [word.strip(",") for word in text.split() if "." in word and not word.startswith("(")]
    assert keys
    for key in keys:
        section = TrainConfig
        for part in key.split("."):
            if not is_dataclass(section) or key.startswith("rollout.agent."):
                break
            (found,) = [field for field in fields(section) if field.name == part]
            section = type(found.default_factory()) if callable(found.default_factory) else None
    assert what_to_lower({}) == ""


def test_every_kind_of_process_has_a_setting_to_lower():
    prefixes = [prefix for prefix, _ in memory_watch._LOWER]
    for name in ("driver", "ray", "sandboxes", "sandbox-host0", "engine0", "policy-rank0"):
        assert sum(name.startswith(prefix) for prefix in prefixes) == 1

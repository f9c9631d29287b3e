"""Named remote calls: order, first failure, deadline, death; output redirection."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray

from mega_agentrl.runtime.memory_watch import pop_all
from mega_agentrl.runtime.remote_calls import (
    DEATHS,
    RAY_MEMORY_KILLS,
    ProcessDiedError,
    RemoteCallError,
    gather,
    gather_with_causes,
    redirect_output,
    translate_call_errors,
)

WAIT_S = 500.0


@ray.remote(num_cpus=0, max_concurrency=16)
class Worker:
    def __init__(self):
        self.released = threading.Event()

    def value(self, value):
        return value

    def release(self):
        self.released.set()

    def value_once_released(self, value):
        assert self.released.wait(WAIT_S)
        return value

    def hang(self):
        threading.Event().wait(WAIT_S)

    def fail(self):
        raise ValueError("bad shard")

    def die(self):
        os._exit(1)


@pytest.fixture(scope="module")
def worker(ray_local):
    """One process for all tests that leave it alive; calls that hang do not block it."""
    return Worker.remote()


def test_results_keep_the_given_order(worker):
    calls = {"slow": worker.value_once_released.remote(1), "fast": worker.value.remote(2)}
    ray.get(calls["fast"], timeout=WAIT_S)
    worker.release.remote()
    assert list(gather(calls, "read", WAIT_S).items()) == [("slow", 1), ("fast", 2)]


def test_first_failure_is_raised_while_a_peer_still_hangs(worker):
    calls = {"rank 0": worker.hang.remote(), "rank 1": worker.fail.remote()}
    with pytest.raises(RemoteCallError) as caught:
        gather(calls, "update", WAIT_S)
    assert (caught.value.operation, caught.value.processes) == ("update", ("rank 1",))
    assert "bad shard" in str(caught.value), "the error of the process reaches the user"
    with pytest.raises(RemoteCallError) as caught:
        gather_with_causes(calls, "update", WAIT_S, grace_s=0.1)
    assert caught.value.processes == ("rank 1",)


def test_errors_of_all_failed_calls_are_collected_and_a_dead_process_is_named(worker):
    dying = Worker.remote()
    calls = {
        "engine 0": worker.value.remote(0),
        "rank 0": dying.die.remote(),
        "rank 1": worker.fail.remote(),
        "rank 2": worker.value.remote(2),
    }
    with pytest.raises(RemoteCallError) as caught:
        gather_with_causes(calls, "send", WAIT_S, grace_s=WAIT_S)
    assert (caught.value.operation, caught.value.processes) == ("send", ("rank 0", "rank 1"))
    assert "bad shard" in str(caught.value)
    with pytest.raises(ProcessDiedError) as caught:
        gather({"rank 2": dying.value.remote(0)}, "load", WAIT_S)
    assert (caught.value.operation, caught.value.process_name) == ("load", "rank 2")
    assert gather_with_causes({"a": worker.value.remote(3)}, "read", WAIT_S, 1.0) == {"a": 3}


def test_deadline_names_the_operation_and_all_silent_processes(worker):
    calls = {"rank 3": worker.hang.remote(), "rank 1": worker.hang.remote()}
    with pytest.raises(RemoteCallError) as caught:
        gather(calls, "save", 0.1)
    assert (caught.value.operation, caught.value.processes) == ("save", ("rank 1", "rank 3"))


def test_output_of_the_process_and_its_children_goes_to_the_file(tmp_path):
    path, before = tmp_path / "logs" / "worker.log", [os.dup(number) for number in (1, 2)]
    try:
        redirect_output(path)
        os.write(1, b"output\n")
        os.write(2, b"error\n")
        subprocess.run(["sh", "-c", "echo child"], check=True)
    finally:
        for number, descriptor in enumerate(before, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
    assert path.read_text() == "output\nerror\nchild\n"


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError("1 worker(s) were killed\n3 pages of numbers"),
        ray.exceptions.NodeDiedError("node 3"),
        ray.exceptions.ActorDiedError(),
        ray.exceptions.WorkerCrashedError(),
    ],
    ids=["memory", "node", "actor", "worker"],
)
def test_process_is_dead_whatever_ray_calls_its_death(error):
    pop_all(RAY_MEMORY_KILLS), pop_all(DEATHS)
    with pytest.raises(ProcessDiedError) as caught, translate_call_errors("update", "rank 1"):
        raise error
    assert (caught.value.operation, caught.value.process_name) == ("update", "rank 1")
    is_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
    assert pop_all(RAY_MEMORY_KILLS) == ["rank 1"] * is_memory
    assert pop_all(DEATHS) == ["rank 1"]
    assert ("killed by Ray's memory monitor" in str(caught.value)) is is_memory
    assert "\n" not in str(caught.value)


def test_every_other_error_of_ray_is_that_of_the_call():
    with pytest.raises(RemoteCallError) as caught, translate_call_errors("update", "rank 1"):
        raise ray.exceptions.ObjectLostError("ab" * 28, None, "")
    assert (caught.value.operation, caught.value.processes) == ("update", ("rank 1",))
    assert not isinstance(caught.value, ProcessDiedError)


@pytest.mark.extended
def test_rank_that_rays_memory_monitor_kills_is_named_with_the_use_of_the_run(tmp_path):
    """In a process of its own, because Ray reads the threshold when it starts."""
    script = Path(__file__).with_name("memory_monitor_kills.py")
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["PolicyRankDiedError policy rank 0"]
    (line,) = [line for line in result.stderr.splitlines() if "for lack of memory" in line]
    assert "killed by Ray's memory monitor for lack of memory: policy rank 0. " in line
    assert "driver 0." in line and "Lower" in line

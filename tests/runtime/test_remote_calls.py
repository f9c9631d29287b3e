"""Named remote calls: order, first failure, deadline, death; output redirection."""

import os
import sys
import time

import pytest
import ray

from mega_agentrl.runtime.remote_calls import (
    RemoteCallError,
    gather,
    gather_with_causes,
    redirect_output,
)


@ray.remote(num_cpus=0)
class Worker:
    def value(self, value, delay_s=0.0):
        time.sleep(delay_s)
        return value

    def fail(self):
        raise ValueError("bad shard")

    def die(self):
        os._exit(1)

    def write(self, path):
        redirect_output(path)
        print("to the file", flush=True)
        print("errors too", file=sys.stderr, flush=True)


def test_results_keep_the_given_order(ray_local):
    worker, other = Worker.remote(), Worker.remote()
    calls = {"slow": worker.value.remote(1, 0.3), "fast": other.value.remote(2)}
    assert list(gather(calls, "read", 300).items()) == [("slow", 1), ("fast", 2)]


def test_first_failure_is_raised_while_a_peer_still_hangs(ray_local):
    worker, other = Worker.remote(), Worker.remote()
    calls = {"rank 0": other.value.remote(0, 600), "rank 1": worker.fail.remote()}
    with pytest.raises(RemoteCallError, match=r"update .*rank 1.*bad shard"):
        gather(calls, "update", 300)


def test_errors_of_all_failed_calls_are_collected(ray_local):
    workers = [Worker.remote() for _ in range(4)]
    calls = {
        "engine 0": workers[0].value.remote(0, 1.0),
        "rank 0": workers[1].die.remote(),
        "rank 1": workers[2].fail.remote(),
        "rank 2": workers[3].value.remote(0, 600),
    }
    with pytest.raises(RemoteCallError, match=r"rank 0 died[^$]*failed on rank 1: .*bad shard"):
        gather_with_causes(calls, "send", 300, 5.0)
    assert gather_with_causes({"a": workers[0].value.remote(3)}, "read", 300, 1.0) == {"a": 3}


def test_deadline_names_operation_and_silent_rank(ray_local):
    worker = Worker.remote()
    with pytest.raises(RemoteCallError, match=r"save: .* 0\.5 s from rank 3"):
        gather({"rank 3": worker.value.remote(0, 600)}, "save", 0.5)


def test_dead_process_is_named(ray_local):
    with pytest.raises(RemoteCallError, match="load: rank 2 died"):
        gather({"rank 2": Worker.remote().die.remote()}, "load", 300)


def test_redirect_output_captures_both_streams(ray_local, tmp_path):
    path = tmp_path / "logs" / "worker.log"
    ray.get(Worker.remote().write.remote(path), timeout=300)
    text = path.read_text()
    assert "to the file" in text and "errors too" in text

"""`RankGroup`: start, named calls, heartbeat, restart, close."""

import os
import signal
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.memory_watch import pop_all
from mega_agentrl.runtime.remote_calls import (
    RAY_MEMORY_KILLS,
    ModelRankDiedError,
    ProcessDiedError,
    RemoteCallError,
)
from mega_agentrl.runtime.workers import rank_group
from mega_agentrl.runtime.workers.placement import Placement
from mega_agentrl.runtime.workers.rank_group import (
    RankActor,
    RankGroup,
    num_threads_per_rank,
)
from mega_agentrl.types.activity import track_activity
from tests.processes import wait_until_gone

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class EchoActor(RankActor):
    """Stores the master address."""

    def start(self, master_address, master_port):
        self.master = master_address, master_port

    def rank_and_master(self):
        return self._rank, self._world_size, *self.master

    def process(self):
        return os.getpid()

    def environment(self, name):
        return os.environ.get(name)

    def say(self, text):
        if text == "fall":
            raise OSError("lost its GPU")
        if text == "sleep":
            with track_activity("talk", peer="rank 1"):
                time.sleep(500)
        return f"{self._rank}: {text}"


class EchoGroup(RankGroup):
    model_name = "echo model"
    log_prefix = "echo"
    actor_class = EchoActor


@pytest.fixture(scope="module")
def group(ray_local, tmp_path_factory):
    """Two ranks."""
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2), cluster=ClusterConfig(call_timeout_s=300.0)
    )
    folder = tmp_path_factory.mktemp("logs")
    made = EchoGroup.launch(config, on_gpu=False, log_folder=folder)
    made.start()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["echo-rank0.log", "echo-rank1.log"]
    yield made
    made.close()
    made.close()


def test_ranks_join_and_answer_by_name(group):
    answers = list(group.gather("places", group.submit_to_ranks("rank_and_master")).values())
    assert [place[:2] for place in answers] == [(0, 2), (1, 2)]
    assert answers[0][2:] == answers[1][2:]
    answers = group.gather("talk", group.submit_each("say", [("a",), ("b",)]))
    assert answers == {"echo model rank 0": "0: a", "echo model rank 1": "1: b"}
    with pytest.raises(RemoteCallError) as caught:
        group.gather("talk", group.submit_each("say", [("a",), ("fall",)]))
    assert (caught.value.operation, caught.value.processes) == ("talk", ("echo model rank 1",))


def test_cuda_starts_with_one_queue(group):
    answers = group.gather("env", group.submit_to_ranks("environment", MAX_CONNECTIONS))
    assert list(answers.values()) == ["1", "1"]


def test_a_rank_compiles_with_its_share_of_the_cores(group):
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    shares = [
        list(group.gather("env", group.submit_to_ranks("environment", name)).values())
        for name in names
    ]
    expected = str(max(1, len(os.sched_getaffinity(0)) // 4))  # half of them for two ranks
    assert shares == [[expected] * 2] * 2


@pytest.mark.parametrize(
    ("num_ranks", "num_node_slots", "num_threads"),
    [(64, 8, 6), (4, 8, 12), (8, 1, 48), (1000, 1000, 1)],
)
def test_the_ranks_of_a_node_share_its_cores_or_half_of_them(
    num_ranks, num_node_slots, num_threads, monkeypatch
):
    """Half with GPUs, or where the engines compute at the same time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    config = TrainConfig(parallel=ParallelConfig(data=num_ranks))
    assert num_threads_per_rank(config, num_node_slots, on_gpu=True) == num_threads
    all_cores = max(1, 96 // min(num_ranks, num_node_slots))
    assert num_threads_per_rank(config, num_node_slots, on_gpu=False) == all_cores
    config.rollout.max_staleness = 1
    assert num_threads_per_rank(config, num_node_slots, on_gpu=False) == num_threads
    config.deterministic = True
    assert num_threads_per_rank(config, num_node_slots, on_gpu=False) == 1


@pytest.mark.extended
def test_rank_info_describes_the_rank():
    config = TrainConfig(cluster=ClusterConfig(call_timeout_s=7.0))
    rank = SimpleNamespace(_config=config, _rank=1, _world_size=2, _num_threads=3)
    address = {"master_address": "here", "master_port": 5}
    numbers = {"rank": 1, "world_size": 2, "timeout_s": 7.0, "num_threads": 3}
    assert asdict(RankActor._rank_info(rank, "here", 5)) == address | numbers


def test_silent_and_stopped_ranks_are_named_and_replaced(group, monkeypatch):
    pids = list(group.gather("pids", group.submit_to_ranks("process")).values())
    talk = group.submit_to_ranks("say", "sleep")
    ends_at = time.monotonic() + 300
    while "echo model rank 0: talk with rank 1" not in group._heartbeat_monitor.describe():
        assert time.monotonic() < ends_at
        time.sleep(0.1)
    config = TrainConfig(cluster=ClusterConfig(call_timeout_s=0.1))
    with monkeypatch.context() as patch:
        patch.setattr(rank_group, "_DEAD_RANK_WAIT_S", 0.1)
        with pytest.raises(RemoteCallError) as caught:
            EchoGroup(group._actors, config).gather("talk", talk)
    assert not isinstance(caught.value, ProcessDiedError), "its heartbeat may still come"
    assert caught.value.processes == ("echo model rank 0", "echo model rank 1")
    os.kill(pids[1], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "HEARTBEAT_TIMEOUT_S", 5.0)
        with pytest.raises(ProcessDiedError) as caught:
            group.gather("talk", talk)
    assert caught.value.process_name == "echo model rank 1"
    assert "echo model rank 0: talk with rank 1" in str(caught.value)
    group.restart()
    answers_after = group.gather("talk", group.submit_to_ranks("say", "a"))
    assert list(answers_after.values()) == ["0: a", "1: a"]
    assert not wait_until_gone(pids, 300)  # a stopped process, too


def test_rank_that_rays_memory_monitor_killed_is_named_though_its_peer_failed_first(monkeypatch):
    def get(call):
        if call == 1:
            raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed")

    def actor(rank):
        return SimpleNamespace(find_free_address=SimpleNamespace(remote=lambda: rank))

    pop_all(RAY_MEMORY_KILLS)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    group = EchoGroup([actor(0), actor(1)], TrainConfig())
    first = RemoteCallError("connection reset by peer", "update", ("echo model rank 0",))
    error = group.diagnose(first)
    assert isinstance(error, ModelRankDiedError)
    assert (error.process_name, error.operation) == ("echo model rank 1", "update")
    assert pop_all(RAY_MEMORY_KILLS) == ["echo model rank 1"]


def test_ranks_can_share_the_gpus_of_another_models_ranks(group, tmp_path, monkeypatch):
    monkeypatch.setattr(group, "visible_gpus", lambda: ["4", "5"])
    # With GPUs of its own it would never start on this machine.
    guest = EchoGroup.launch(group._config, on_gpu=True, log_folder=tmp_path, host=group)
    try:
        guest.start()
        name = "CUDA_VISIBLE_DEVICES"
        answers = guest.gather("env", guest.submit_to_ranks("environment", name))
        assert list(answers.values()) == ["4", "5"]
    finally:
        guest.close()
    answers = group.gather("talk", group.submit_to_ranks("say", "a"))
    assert list(answers.values()) == ["0: a", "1: a"], "its placement is that of the host"


@pytest.mark.extended
def test_a_given_placement_survives_restart_and_close(ray_local, tmp_path):
    config = TrainConfig(cluster=ClusterConfig(call_timeout_s=300.0))
    placement = Placement(config, on_gpu=False, with_engines=True)
    group = EchoGroup.launch(config, on_gpu=False, log_folder=tmp_path, placement=placement)
    try:
        group.start()
        group.restart()
        answers = group.gather("talk", group.submit_to_ranks("say", "a"))
        assert list(answers.values()) == ["0: a"]
        group.close()

        @ray.remote(num_cpus=1)
        def inside():
            return True

        task = inside.options(scheduling_strategy=placement.for_engine(0)).remote()
        assert ray.get(task, timeout=300)
    finally:
        group.close()
        placement.release()

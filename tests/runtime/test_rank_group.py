"""Ranks as a group: they meet, are called by name, and end; rows come once."""

import os
import signal
import time

import pytest
import ray

from mega_agentrl.config.schema import ClusterConfig, ParallelConfig, TrainConfig
from mega_agentrl.runtime.rank_group import RankActor, RankGroup, rows_of
from mega_agentrl.runtime.remote import DiedError, RemoteError
from mega_agentrl.types.doing import doing


class EchoActor(RankActor):
    """Notes where the ranks met."""

    def start(self, master_address, master_port):
        self.seat = self._seat(master_address, master_port)

    def place(self):
        return self.seat.rank, self.seat.world_size, self.seat.master_port

    def process(self):
        return os.getpid()

    def say(self, text):
        if text == "fall":
            raise OSError("lost its GPU")
        if text == "sleep":
            with doing("talk", peer="rank 1"):
                time.sleep(30)
        return f"{self._rank}: {text}"


class EchoGroup(RankGroup):
    kind = "echo model"
    log_name = "echo"
    actor_class = EchoActor


def test_ranks_meet_answer_by_name_and_end(ray_local, tmp_path):
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2), cluster=ClusterConfig(call_deadline_s=60.0)
    )
    group = EchoGroup.launch(config, on_gpu=False, log_folder=tmp_path)
    try:
        group.start()
        places = list(group.gather("places", group.start_on_ranks("place")).values())
        assert [place[:2] for place in places] == [(0, 2), (1, 2)]
        assert places[0][2] == places[1][2]
        said = group.gather("talk", group.start_each("say", [("a",), ("b",)]))
        assert said == {"echo model rank 0": "0: a", "echo model rank 1": "1: b"}
        with pytest.raises(RemoteError, match="talk failed on echo model rank 1"):
            group.gather("talk", group.start_each("say", [("a",), ("fall",)]))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "echo-rank0.log",
            "echo-rank1.log",
        ]
    finally:
        group.close()
        group.close()


def is_running(pid):
    """Whether the process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stopped_rank_is_named_long_before_the_deadline_and_replaced(
    ray_local, tmp_path, record_property
):
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2), cluster=ClusterConfig(call_deadline_s=300.0)
    )
    group = EchoGroup.launch(config, on_gpu=False, log_folder=tmp_path)
    try:
        group.start()
        pids = list(group.gather("pids", group.start_on_ranks("process")).values())
        os.kill(pids[1], signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(DiedError, match="echo model rank 1 has not been heard of") as found:
            group.gather("talk", group.start_each("say", [("sleep",), ("a",)]))
        took_s = time.monotonic() - start_s
        record_property("named_after_s", took_s)
        assert took_s < 60, "twice the promised thirty seconds, as the machine may be busy"
        assert "echo model rank 0: talk with rank 1" in str(found.value)
        group.restart()
        said = group.gather("talk", group.start_on_ranks("say", "a"))
        assert list(said.values()) == ["0: a", "1: a"]
        while any(map(is_running, pids)):
            assert time.monotonic() - start_s < 120, "a stopped process outlives its group"
            time.sleep(0.1)
    finally:
        group.close()


def test_a_silent_rank_is_named(ray_local, tmp_path):
    config = TrainConfig(cluster=ClusterConfig(call_deadline_s=1.0))
    actor = ray.remote(num_cpus=0)(EchoActor).remote(config, 0, 1, str(tmp_path / "log"))
    ray.get(actor.address.remote())
    group = EchoGroup([actor], config)
    with pytest.raises(RemoteError, match="no answer within 1 s from echo model rank 0"):
        group.gather("talk", group.start_on_ranks("say", "sleep"))
    group.close()


def test_every_row_comes_once():
    answers = [([2, 0], "x"), None, ([1], "y")]
    assert list(rows_of(answers, 3)) == [([2, 0], "x"), ([1], "y")]
    for wrong in ([([0], "x")], [([0, 1], "x"), ([1], "y")]):
        with pytest.raises(AssertionError, match="each row once"):
            list(rows_of(wrong, 2))


def test_places_that_engines_share_outlive_the_ranks(ray_local, tmp_path):
    class Host(EchoGroup):
        hosts_engines = True

    config = TrainConfig(cluster=ClusterConfig(call_deadline_s=60.0, colocated=True))
    group = Host.launch(config, on_gpu=False, log_folder=tmp_path)
    try:
        group.start()
        places = group._placement
        group.restart()
        assert group._placement is places
        said = group.gather("talk", group.start_on_ranks("say", "a"))
        assert list(said.values()) == ["0: a"]
    finally:
        group.close()
    assert group._placement is None

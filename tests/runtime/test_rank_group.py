"""Ranks as a group: they meet, are called by name, and end; rows come once."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from mega_agentrl.config.schema import ClusterConfig, ParallelConfig, TrainConfig
from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.rank_group import RankActor, RankGroup, rows_of
from mega_agentrl.runtime.remote import DiedError, RemoteError
from mega_agentrl.types.doing import doing


class EchoActor(RankActor):
    """Notes where the ranks met."""

    def start(self, master_address, master_port):
        self.met = master_address, master_port

    def place(self):
        return self._rank, self._world_size, *self.met

    def process(self):
        return os.getpid()

    def say(self, text):
        if text == "fall":
            raise OSError("lost its GPU")
        if text == "sleep":
            with doing("talk", peer="rank 1"):
                time.sleep(600)
        return f"{self._rank}: {text}"


class EchoGroup(RankGroup):
    kind = "echo model"
    log_name = "echo"
    actor_class = EchoActor


def is_running(pid):
    """Whether the process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    ends_at = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.1)


@pytest.fixture(scope="module")
def group(ray_local, tmp_path_factory):
    """Two ranks."""
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2), cluster=ClusterConfig(call_deadline_s=300.0)
    )
    folder = tmp_path_factory.mktemp("logs")
    made = EchoGroup.launch(config, on_gpu=False, log_folder=folder)
    made.start()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["echo-rank0.log", "echo-rank1.log"]
    yield made
    made.close()
    made.close()


def test_ranks_meet_and_answer_by_name(group):
    places = list(group.gather("places", group.start_on_ranks("place")).values())
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    assert places[0][2:] == places[1][2:]
    said = group.gather("talk", group.start_each("say", [("a",), ("b",)]))
    assert said == {"echo model rank 0": "0: a", "echo model rank 1": "1: b"}
    with pytest.raises(RemoteError, match="talk failed on echo model rank 1"):
        group.gather("talk", group.start_each("say", [("a",), ("fall",)]))


def test_a_seat_is_the_rank_s_own():
    config = TrainConfig(cluster=ClusterConfig(call_deadline_s=7.0))
    rank = SimpleNamespace(_config=config, _rank=1, _world_size=2, _num_threads=3)
    seat = RankActor._seat(rank, "here", 5)
    assert (seat.rank, seat.world_size, seat.num_threads) == (1, 2, 3)
    assert (seat.master_address, seat.master_port, seat.timeout_s) == ("here", 5, 7.0)


def test_a_stopped_rank_is_named_long_before_the_deadline_and_replaced(group, monkeypatch):
    pids = list(group.gather("pids", group.start_on_ranks("process")).values())
    talk = group.start_on_ranks("say", "sleep")
    wait_until(lambda: "echo model rank 0: talk with rank 1" in group._listener.described())
    os.kill(pids[1], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "SILENCE_S", 5.0)
        with pytest.raises(DiedError, match="echo model rank 1 has not been heard of") as found:
            group.gather("talk", talk)
    assert "echo model rank 0: talk with rank 1" in str(found.value)
    group.restart()
    said = group.gather("talk", group.start_on_ranks("say", "a"))
    assert list(said.values()) == ["0: a", "1: a"]
    wait_until(lambda: not any(map(is_running, pids)))  # a stopped process, too


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

    config = TrainConfig(cluster=ClusterConfig(call_deadline_s=300.0, colocated=True))
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

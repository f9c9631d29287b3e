"""Ranks in one process on one store, and a rank 0 in another process that is killed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mega_agentrl.actor.checkpoint.save_barrier import SaveBarrier
from tests.parallel.pool import fork_server

NEVER_S = 600.0


class Clock:
    """A clock that advances only by `pass_by`, so that a slow machine cannot cause a timeout."""

    def __init__(self):
        self.current = 0.0

    def __call__(self):
        return self.current

    def pass_by(self, seconds, *pairs):
        """Advance second by second; in each, every (listener, speaker) pair sees a heartbeat."""
        for _ in range(seconds):
            self.current += 1.0
            for listener, speaker in pairs:
                before = listener._last_beats.get(speaker)
                while listener._last_beats.get(speaker) == before:
                    time.sleep(0.01)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def roll(clock):
    """Return `roll(size)`, which creates that many ranks on one store."""
    made = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def make(size):
        quick = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 3.0, "clock": clock}
        made.extend(
            SaveBarrier(store.clone(), rank, size, "saving x", **quick) for rank in range(size)
        )
        return made

    yield make
    for one in made:
        one.close()


def test_all_ranks_get_the_announcement_and_the_leader_waits_for_all(roll):
    leader, second, third = roll(3)
    leader.announce("folder")
    assert second.wait_announcement() == third.wait_announcement() == "folder"
    leader.mark_done()
    while 0 in third.missing_ranks():
        time.sleep(0.05)
    assert leader.missing_ranks() == second.missing_ranks() == [1, 2]
    second.mark_done()
    while 1 in leader.missing_ranks():
        time.sleep(0.05)
    assert leader.missing_ranks() == [2]
    third.mark_done()
    leader.wait_all_done()
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(leader.finish)
        second.wait_finished()
        assert not finishing.done()
        third.wait_finished()
        finishing.result(60)


def test_a_rank_without_heartbeats_is_named_on_every_rank(roll, clock):
    leader, second, third = roll(3)
    third.close()
    clock.pass_by(6, (leader, 1), (second, 0))
    for one in (leader, second):
        with pytest.raises(RuntimeError, match=r"saving x: .*rank 2 has sent no heartbeat"):
            one.wait_all_done() if one is leader else one.wait_finished()
    assert second.error == leader.error


def test_a_rank_that_dies_after_the_commit_does_not_fail_the_save(roll, clock):
    leader, second, third = roll(3)
    second.mark_done()
    third.mark_done()
    leader.wait_all_done()
    third.close()
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(leader.finish)
        second.wait_finished()
        clock.pass_by(6, (leader, 1), (second, 0))
        finishing.result(60)
    assert leader.error is None


def test_a_slow_rank_is_not_a_dead_one(roll, clock):
    leader, second = roll(2)
    clock.pass_by(8, (leader, 1), (second, 0))
    assert leader.error is second.error is None
    second.mark_done()
    leader.wait_all_done()


def test_the_first_failure_is_raised_on_every_rank(roll):
    leader, second, third = roll(3)
    third.fail("the disk is full")
    third.fail("something after that")
    for one in (leader, second, third):
        with pytest.raises(RuntimeError, match="saving x: rank 2: the disk is full"):
            one.wait_finished()


def test_a_rank_0_without_heartbeats_is_noticed_by_the_others(roll, clock):
    leader, second = roll(2)
    leader.close()
    while second.error is None:
        clock.pass_by(1)
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="rank 0 has sent no heartbeat"):
        second.wait_announcement()


def lead(connection):
    """Rank 0 in its own process: send the port of the store, then heartbeats until killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    SaveBarrier(
        store.clone(), 0, 2, "saving x", heartbeat_interval_s=0.05, heartbeat_timeout_s=NEVER_S
    )
    connection.send(store.port)
    connection.recv()


def test_a_killed_rank_0_that_hosts_the_store_is_an_error_not_a_wait():
    context = fork_server()
    here, there = context.Pipe()
    process = context.Process(target=lead, args=(there,), daemon=True)
    process.start()
    try:
        store = dist.TCPStore("127.0.0.1", here.recv(), is_master=False)
        one = SaveBarrier(
            store, 1, 2, "saving x", heartbeat_interval_s=0.05, heartbeat_timeout_s=NEVER_S
        )
        while not store.check(["beat/0"]):
            time.sleep(0.05)
        process.kill()
        with pytest.raises(RuntimeError, match="process of rank 0 was killed"):
            one.wait_finished()
        one.close()
    finally:
        process.kill()
        process.join()

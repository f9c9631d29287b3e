"""Ranks as threads on one store, and a leader that is a process of its own and gets killed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mega_agentrl.actor.roll_call import RollCall
from tests.parallel.fork_server import fork_server

NEVER_S = 600.0


class Clock:
    """Time that passes only for those who are told so, however slow the machine is."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds, *pairs):
        """Let a second pass after another, in each of which every listener hears its speaker."""
        for _ in range(seconds):
            self.now += 1.0
            for listener, speaker in pairs:
                before = listener._heard[speaker][0]
                while listener._heard[speaker][0] == before:
                    time.sleep(0.01)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def roll(clock):
    """`roll(size)`: that many ranks over one store."""
    made = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def make(size):
        quick = {"beat_s": 0.05, "silence_s": 3.0, "clock": clock}
        made.extend(
            RollCall(store.clone(), rank, size, "saving x", **quick) for rank in range(size)
        )
        return made

    yield make
    for one in made:
        one.close()


def test_everyone_hears_the_word_and_leaves_when_all_are_done(roll):
    leader, second, third = roll(3)
    leader.tell("folder")
    assert second.hear() == third.hear() == "folder"
    assert leader.missing() == [1, 2]
    second.done()
    while 1 in leader.missing():
        time.sleep(0.05)
    assert leader.missing() == [2]
    third.done()
    leader.wait_all()
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(leader.finish)
        second.wait_finished()
        assert not finishing.done()
        third.wait_finished()
        finishing.result(60)


def test_a_rank_that_falls_silent_is_named_everywhere(roll, clock):
    leader, second, third = roll(3)
    third.close()
    clock.pass_by(6, (leader, 1), (second, 0))
    for one in (leader, second):
        with pytest.raises(RuntimeError, match=r"saving x: .*rank 2 has not been heard of"):
            one.wait_all() if one is leader else one.wait_finished()
    assert second.error == leader.error


def test_a_rank_that_dies_after_the_end_does_not_undo_it(roll, clock):
    leader, second, third = roll(3)
    second.done()
    third.done()
    leader.wait_all()
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
    second.done()
    leader.wait_all()


def test_a_failure_is_everyones_and_the_first_counts(roll):
    leader, second, third = roll(3)
    third.fail("the disk is full")
    third.fail("something after that")
    for one in (leader, second, third):
        with pytest.raises(RuntimeError, match="saving x: rank 2: the disk is full"):
            one.wait_finished()


def test_a_silent_leader_is_noticed_by_the_others(roll, clock):
    leader, second = roll(2)
    leader.close()
    while second.error is None:
        clock.pass_by(1)
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="rank 0 has not been heard of"):
        second.hear()


def lead(connection):
    """Rank 0 in a process of its own: sends the port of its store, and beats until it is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    RollCall(store.clone(), 0, 2, "saving x", beat_s=0.05, silence_s=NEVER_S)
    connection.send(store.port)
    connection.recv()


def test_the_store_going_with_the_leader_is_an_error_not_a_wait():
    context = fork_server()
    here, there = context.Pipe()
    process = context.Process(target=lead, args=(there,), daemon=True)
    process.start()
    try:
        store = dist.TCPStore("127.0.0.1", here.recv(), is_master=False)
        one = RollCall(store, 1, 2, "saving x", beat_s=0.05, silence_s=NEVER_S)
        while not store.check(["beat/0"]):
            time.sleep(0.05)
        process.kill()
        with pytest.raises(RuntimeError, match="process of rank 0 was killed"):
            one.wait_finished()
        one.close()
    finally:
        process.kill()
        process.join()

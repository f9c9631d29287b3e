"""Ranks as threads on one store, and a leader that is a process of its own and gets killed."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mega_agentrl.actor.roll_call import RollCall

QUICK = {"beat_s": 0.05, "silence_s": 3.0}


@pytest.fixture
def roll():
    """`roll(size)`: that many ranks over one store."""
    made = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def make(size):
        made.extend(
            RollCall(store.clone(), rank, size, "saving x", **QUICK) for rank in range(size)
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
        time.sleep(0.1)
        assert not finishing.done()
        second.wait_finished()
        third.wait_finished()
        finishing.result(5)


def test_a_rank_that_falls_silent_is_named_everywhere(roll):
    leader, second, third = roll(3)
    third.close()
    for one in (leader, second):
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match=r"saving x: .*rank 2 has not been heard of"):
            one.wait_all() if one is leader else one.wait_finished()
        assert time.monotonic() - start_s < 20
    assert second.error == leader.error


def test_a_rank_that_dies_after_the_end_does_not_undo_it(roll):
    leader, second, third = roll(3)
    second.done()
    third.done()
    leader.wait_all()
    third.close()
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(leader.finish)
        second.wait_finished()
        finishing.result(5)
    assert leader.error is None


def test_a_slow_rank_is_not_a_dead_one(roll):
    leader, second = roll(2)
    time.sleep(1.5 * QUICK["silence_s"])
    assert leader.error is None
    second.done()
    leader.wait_all()


def test_a_failure_is_everyones_and_the_first_counts(roll):
    leader, second, third = roll(3)
    third.fail("the disk is full")
    third.fail("something after that")
    for one in (leader, second, third):
        with pytest.raises(RuntimeError, match="saving x: rank 2: the disk is full"):
            one.wait_finished()


def test_a_silent_leader_is_noticed_by_the_others(roll):
    leader, second = roll(2)
    leader.close()
    with pytest.raises(RuntimeError, match="rank 0 has not been heard of"):
        second.hear()


LEADER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
from mega_agentrl.actor.roll_call import RollCall
RollCall(store.clone(), 0, 2, "saving x", beat_s=0.05)
time.sleep(100)
"""


def test_the_store_going_with_the_leader_is_an_error_not_a_wait():
    process = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        one = RollCall(store, 1, 2, "saving x", beat_s=0.05, silence_s=10.0)
        while not store.check(["beat/0"]):
            time.sleep(0.05)
        process.kill()
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="process of rank 0 was killed"):
            one.wait_finished()
        assert time.monotonic() - start_s < 10
        one.close()
    finally:
        process.kill()
        process.wait()

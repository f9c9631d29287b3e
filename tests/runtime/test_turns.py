"""Whose turn it is on shared GPUs, with sides that note what they do.

A whole run on shared GPUs is in `tests/train/test_loop.py`, the bridge's part in `test_bridge`.
"""

import threading

import pytest

from mega_agentrl.runtime.turns import Holder, Turns


class Side:
    """Policy and engines in one list; `fails`: the call that raises."""

    def __init__(self, told, fails=()):
        self.told, self.fails = told, set(fails)

    def note(self, what):
        self.told.append(what)
        if what in self.fails:
            raise RuntimeError(what)

    def occupy(self, parts):
        self.note(f"policy {'+'.join(sorted(parts)) or 'nothing'}")

    def sleep(self):
        self.note("sleep")

    def wake(self, part, only):
        self.note(f"wake {part} {list(only)}")


def sides(**fails):
    told = []
    return told, Turns(Side(told, fails.get("policy", ())), Side(told, fails.get("engines", ())))


SEND = ["policy weights", "wake weights [0, 1]", "policy nothing", "wake cache [0, 1]"]


def test_once_around():
    told, turns = sides()
    assert turns.holder is Holder.policy
    turns.to_policy()
    assert told == []
    turns.to_transfer([0, 1])
    turns.to_engines([0, 1])
    assert told == SEND
    assert turns.holder is Holder.engines
    turns.to_policy()
    assert told[4:] == ["sleep", "policy gradients+optimizer+weights"]


def test_a_transfer_between_rollouts_begins_with_engines_asleep():
    told, turns = sides()
    turns.make_room()
    told.clear()
    turns.to_transfer([0, 1])
    turns.to_engines([0, 1])
    assert told == ["sleep", *SEND]


def test_a_transfer_begins_again_for_those_that_are_there_now():
    told, turns = sides()
    turns.to_transfer([0, 1])
    turns.make_room()  # an engine was lost: its successor starts
    with turns.start_of_engine():
        told.append("start")
    turns.to_transfer([0, 2])
    turns.to_engines([0, 2])
    assert told[2:4] == ["policy nothing", "start"]
    assert told[4:7] == ["sleep", "policy weights", "wake weights [0, 2]"]


def test_a_policy_that_died_in_a_transfer_begins_with_the_gpus():
    told, turns = sides(policy=["policy nothing"])
    turns.to_transfer([0])
    turns.renew_policy()
    assert told[-1] == "sleep"
    assert turns.holder is Holder.policy
    turns.to_transfer([0])
    with pytest.raises(RuntimeError, match="policy nothing"):
        turns.to_engines([0])
    # Dead, it has no memory: an engine may start.
    with turns.start_of_engine():
        assert turns.holder is Holder.engines


def test_engines_that_do_not_sleep_keep_their_turn():
    told, turns = sides(engines=["sleep"])
    turns.to_transfer([0])
    turns.to_engines([0])
    with pytest.raises(RuntimeError, match="sleep"):
        turns.to_policy()
    assert turns.holder is Holder.engines
    assert "policy gradients+optimizer+weights" not in told


def test_the_policy_waits_for_an_engine_that_starts_and_the_other_way_round():
    told, turns = sides()
    turns.make_room()
    started = threading.Event()
    loading = threading.Thread(target=turns.to_policy)
    with turns.start_of_engine():
        loading.start()
        started.wait(0.2)
        assert turns.holder is Holder.engines
        told.append("started")
    loading.join(10)
    assert turns.holder is Holder.policy
    assert told[-2:] == ["started", "policy gradients+optimizer+weights"]

    def start():
        with turns.start_of_engine():
            told.append("started again")

    starting = threading.Thread(target=start)
    starting.start()
    starting.join(0.2)
    assert starting.is_alive()
    turns.to_transfer([0])
    turns.to_engines([0])
    starting.join(10)
    assert "started again" in told[told.index("policy nothing", 2) :]

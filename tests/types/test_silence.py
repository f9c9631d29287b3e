"""Silence counts while the watcher runs; a fake clock, no processes."""

import math

import pytest

from mega_agentrl.types.silence import MAX_ROUND_S, SilenceTracker


class Clock:
    """A clock that the tests set."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("events", "silence_s"),
    [
        ([1.0, 1.0], 0.0),
        (["heard"], 0.0),
        (["heard", 1.0, 2.0], 3.0),
        (["heard", 4.0, "heard", 2.0], 2.0),
        (["heard", MAX_ROUND_S], MAX_ROUND_S),
        (["heard", 2.0, 600.0], 2.0),
        (["heard", 2.0, 600.0, 3.0], 5.0),
        (["heard", 600.0, "heard", 1.0], 1.0),
    ],
    ids=[
        "never_heard",
        "just_heard",
        "silent",
        "heard_again",
        "longest_round",
        "paused",
        "silent_before_and_after_a_pause",
        "heard_after_a_pause",
    ],
)
def test_silence_is_the_time_that_the_watcher_ran_since_the_last_sign_of_life(events, silence_s):
    """Each number is the length of a round in seconds."""
    clock = Clock()
    tracker = SilenceTracker(clock=clock)
    for event in events:
        if event == "heard":
            tracker.record_sign_of_life("rank 0")
        else:
            clock.now += event
            tracker.begin_round()
    assert tracker.silence_s("rank 0") == silence_s
    assert tracker.silence_s("rank 1") == 0.0


def test_silence_does_not_grow_before_a_paused_watcher_runs_again():
    clock = Clock()
    tracker = SilenceTracker(clock=clock)
    tracker.record_sign_of_life("rank 0")
    clock.now += 600.0  # another thread may ask before the watcher's begins its round
    assert tracker.silence_s("rank 0") == 0.0


def test_every_round_counts_without_a_limit():
    clock = Clock()
    tracker = SilenceTracker(max_round_s=math.inf, clock=clock)
    tracker.record_sign_of_life(0)
    clock.now += 600.0
    tracker.begin_round()
    assert tracker.silence_s(0) == 600.0

"""Silence counts while the watcher runs; a fake clock, no processes."""

import math

import pytest

from mega_agentrl.types.liveness import MAX_ROUND_S, LivenessTracker
from tests.manual_clock import ManualClock


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
        *("never-heard", "just-heard", "silent", "heard-again", "longest-round", "paused"),
        *("silent-before-and-after-a-pause", "heard-after-a-pause"),
    ],
)
def test_silence_is_the_time_that_the_watcher_ran_since_the_last_heartbeat(events, silence_s):
    """Each number is the length of a round in seconds."""
    clock = ManualClock(100.0)
    tracker = LivenessTracker(clock=clock)
    for event in events:
        if event == "heard":
            tracker.record_heartbeat("rank 0")
        else:
            clock.now_s += event
            tracker.begin_round()
    assert tracker.seconds_since_heartbeat("rank 0") == silence_s
    assert tracker.seconds_since_heartbeat("rank 1") == 0.0


def test_silence_does_not_grow_before_a_paused_watcher_runs_again():
    clock = ManualClock(100.0)
    tracker = LivenessTracker(clock=clock)
    tracker.record_heartbeat("rank 0")
    clock.now_s += 600.0  # another thread may ask before the watcher's begins its round
    assert tracker.seconds_since_heartbeat("rank 0") == 0.0


def test_every_round_counts_without_a_limit():
    clock = ManualClock(100.0)
    tracker = LivenessTracker(max_round_s=math.inf, clock=clock)
    tracker.record_heartbeat(0)
    clock.now_s += 600.0
    tracker.begin_round()
    assert tracker.seconds_since_heartbeat(0) == 600.0

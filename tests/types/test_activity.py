"""Activities nest, end with their `with` body, and are visible to other threads."""

import threading
import time

import pytest

from mega_agentrl.types import activity as module
from mega_agentrl.types.activity import (
    WAIT_OVERDUE_S,
    WORK_OVERDUE_S,
    current_activities,
    track_activity,
)


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch):
    """Hide the activities of threads that earlier tests left waiting."""
    monkeypatch.setattr(module, "_activities", {})


def test_activities_nest_and_end_after_an_error():
    assert current_activities() == ()
    start_s = time.monotonic()
    with track_activity("update"):
        with (
            pytest.raises(ConnectionAbortedError),
            track_activity("receive", "rank 2", overdue_after_s=WAIT_OVERDUE_S),
        ):
            outer, inner = current_activities()
            raise ConnectionAbortedError
        assert [activity.operation for activity in current_activities()] == ["update"]
    assert current_activities() == ()
    assert (outer.operation, outer.peer) == ("update", "")
    assert (inner.operation, inner.peer) == ("receive", "rank 2")
    assert (outer.overdue_after_s, inner.overdue_after_s) == (WORK_OVERDUE_S, WAIT_OVERDUE_S)
    assert start_s <= outer.started_at_s <= inner.started_at_s


def test_another_thread_reads_the_activities():
    found = []
    with track_activity("save"):
        reader = threading.Thread(target=lambda: found.extend(current_activities()))
        reader.start()
        reader.join()
    assert [activity.operation for activity in found] == ["save"]


def test_concurrent_threads_end_their_own_activities_only():
    inside, leave = threading.Event(), threading.Event()

    def receive():
        with track_activity("receive", "rank 1"):
            inside.set()
            assert leave.wait(120)

    other = threading.Thread(target=receive)
    with track_activity("send", "rank 2"):
        other.start()
        assert inside.wait(120)
        assert [activity.operation for activity in current_activities()] == ["send", "receive"]
    assert [activity.operation for activity in current_activities()] == ["receive"]
    leave.set()
    other.join()
    assert current_activities() == ()

"""Marks nest, end with their bodies, and are read from another thread."""

import threading
import time

import pytest

from mega_agentrl.types import doing as module
from mega_agentrl.types.doing import WAIT_S, WORK_S, doing, under_way


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch):
    """Threads that earlier tests left waiting still tell what they do."""
    monkeypatch.setattr(module, "_marks", {})


def test_marks_nest_and_end_whatever_happens():
    assert under_way() == ()
    start_s = time.monotonic()
    with doing("update"):
        with pytest.raises(OSError, match="gone"), doing("receive", "rank 2", bound_s=WAIT_S):
            outer, inner = under_way()
            raise OSError("gone")
        assert [mark.operation for mark in under_way()] == ["update"]
    assert under_way() == ()
    assert (outer.operation, outer.peer) == ("update", "")
    assert (inner.operation, inner.peer) == ("receive", "rank 2")
    assert (outer.bound_s, inner.bound_s) == (WORK_S, WAIT_S)
    assert start_s <= outer.since_s <= inner.since_s


def test_another_thread_sees_them():
    seen = []
    with doing("save"):
        reader = threading.Thread(target=lambda: seen.extend(under_way()))
        reader.start()
        reader.join()
    assert [mark.operation for mark in seen] == ["save"]


def test_threads_that_work_at_the_same_time_end_their_own_marks_only():
    inside, leave = threading.Event(), threading.Event()

    def receive():
        with doing("receive", "rank 1"):
            inside.set()
            assert leave.wait(120)

    other = threading.Thread(target=receive)
    with doing("send", "rank 2"):
        other.start()
        assert inside.wait(120)
        assert [mark.operation for mark in under_way()] == ["send", "receive"]
    assert [mark.operation for mark in under_way()] == ["receive"]
    leave.set()
    other.join()
    assert under_way() == ()

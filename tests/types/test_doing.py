"""Marks nest, end with their bodies, and are read from another thread."""

import threading
import time

import pytest

from mega_agentrl.types.doing import doing, under_way


def test_marks_nest_and_end_whatever_happens():
    assert under_way() == ()
    start_s = time.monotonic()
    with doing("update"):
        with pytest.raises(OSError, match="gone"), doing("receive", "rank 2"):
            outer, inner = under_way()
            raise OSError("gone")
        assert [mark.operation for mark in under_way()] == ["update"]
    assert under_way() == ()
    assert (outer.operation, outer.peer) == ("update", "")
    assert (inner.operation, inner.peer) == ("receive", "rank 2")
    assert start_s <= outer.since_s <= inner.since_s


def test_another_thread_sees_them():
    seen = []
    with doing("save"):
        reader = threading.Thread(target=lambda: seen.extend(under_way()))
        reader.start()
        reader.join()
    assert [mark.operation for mark in seen] == ["save"]

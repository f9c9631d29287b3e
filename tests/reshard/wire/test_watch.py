"""A peer that leaves, politely or not."""

from __future__ import annotations

import time

import pytest

from mega_agentrl.reshard.wire.gloo import GlooWire
from mega_agentrl.reshard.wire.watch import Watch
from tests.reshard.wire.ranks import close, ranks


def watch(seat, peers):
    seat.kept.append(Watch(seat.wire, peers))


def gone(seat, peer, timeout_s):
    """Who is gone, when the peer is or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while peer not in seat.kept[0].gone and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return sorted(seat.kept[0].gone)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_it_is_noticed_and_nobody_else_is_suspected(how):
    with ranks(3) as group:
        group.join(GlooWire.join)
        group.ask(0, watch, [1, 2])
        group.ask(1, watch, [0])
        group.ask(2, watch, [0])
        assert group.ask(0, gone, 1, 0.3) == []
        if how == "kill":
            group.kill(1)
        else:
            group.ask(1, close)
        assert group.ask(0, gone, 1, 20.0) == [1]

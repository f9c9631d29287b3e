"""A peer that leaves, politely or not."""

from __future__ import annotations

import time

import pytest

from mega_agentrl.reshard.transports.gloo import GlooTransport
from mega_agentrl.reshard.transports.peer_monitor import PeerMonitor
from tests.reshard.transports.ranks import close, ranks


def watch(rank_state, peers):
    rank_state.saved.append(PeerMonitor(rank_state.transport, peers))


def gone(rank_state, peer, timeout_s):
    """Who is gone, when the peer is or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while peer not in rank_state.saved[0].lost_peers and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return sorted(rank_state.saved[0].lost_peers)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_it_is_noticed_and_nobody_else_is_suspected(how):
    with ranks(3) as group:
        group.join(GlooTransport.join)
        group.ask(0, watch, [1, 2])
        group.ask(1, watch, [0])
        group.ask(2, watch, [0])
        assert group.ask(0, gone, 1, 0.3) == []
        if how == "kill":
            group.kill(1)
        else:
            group.ask(1, close)
        assert group.ask(0, gone, 1, 20.0) == [1]

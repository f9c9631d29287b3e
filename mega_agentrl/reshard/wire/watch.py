"""Notices peers that leave, for wires that would wait for them in vain.

A thread per peer waits for a message over gloo that nobody ever sends; it ends when the
connection does, because the peer has closed it, was killed, or this rank has left.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.reshard.wire.ends import Arrival, Wire

_FOREVER_S = 10 * 365 * 86_400.0


class Watch:
    """gone: peers that have left. Nothing else may be received from them over the wire."""

    def __init__(self, wire: Wire, peers: Iterable[int]) -> None:
        self.gone: set[int] = set()
        for peer in peers:
            arrival = wire.receive(torch.empty(1, dtype=torch.uint8), peer)
            thread = threading.Thread(
                target=self._wait, args=(arrival, peer), name=f"watch-{peer}", daemon=True
            )
            thread.start()

    def _wait(self, arrival: Arrival, peer: int) -> None:
        with suppress(RuntimeError):
            arrival.wait(_FOREVER_S)
        self.gone.add(peer)

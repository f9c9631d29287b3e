"""Detects peers that disconnect, for transports that would otherwise wait for them in vain.

One thread per peer waits over gloo for a message that nobody ever sends. The wait ends with the
connection: when the peer has closed it, was killed, or this rank has disconnected.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.reshard.transports.base import RecvHandle, Transport

_NO_TIMEOUT_S = 10 * 365 * 86_400.0


class PeerMonitor:
    """Watches the connections to some peers.

    Nothing else may be received from these peers over the transport.
    """

    def __init__(self, transport: Transport, peers: Iterable[int]) -> None:
        self.lost_peers: set[int] = set()
        """Peers that have disconnected."""
        for peer in peers:
            handle = transport.receive(torch.empty(1, dtype=torch.uint8), peer)
            thread = threading.Thread(
                target=self._wait_for_disconnect,
                args=(handle, peer),
                name=f"peer-monitor-{peer}",
                daemon=True,
            )
            thread.start()

    def _wait_for_disconnect(self, handle: RecvHandle, peer: int) -> None:
        with suppress(RuntimeError):
            handle.wait(_NO_TIMEOUT_S)
        self.lost_peers.add(peer)

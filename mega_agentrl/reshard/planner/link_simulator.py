"""Simulated send and receive ports of every rank: when a transfer can start and when it ends.

Per link type, a rank has one port that sends and one that receives. Each port carries one transfer
at a time at the speed of the link, and ports do not affect each other. Both the order of a plan and
its predicted duration rest on this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.topology import LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation


class LinkSimulator:
    """Tracks when each port is free; all times are seconds from the start.

    Args:
        locations: Location of every rank.
        speeds: Bandwidth by link type.
    """

    def __init__(self, locations: Sequence[RankLocation], speeds: LinkSpeeds) -> None:
        self._locations = locations
        self._seconds_per_byte = {link: speeds.transfer_s(link, 1) for link in LinkType}
        self.send_free_at_s = {link: [0.0] * len(locations) for link in LinkType}
        self.receive_free_at_s = {link: [0.0] * len(locations) for link in LinkType}
        """By class and rank: when that port is free."""

    def transfer(self, source: int, target: int, num_bytes: int, ready: float) -> float:
        """Occupy both ports with one transfer and return its end.

        Args:
            source: Sending rank.
            target: Receiving rank.
            num_bytes: Size of the transfer.
            ready: Time at which the source has the bytes.
        """
        link = link_type_between(self._locations[source], self._locations[target])
        sends, receives = self.send_free_at_s[link], self.receive_free_at_s[link]
        end = max(sends[source], receives[target], ready) + num_bytes * self._seconds_per_byte[link]
        sends[source] = receives[target] = end
        return end

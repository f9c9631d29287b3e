"""A clock of every rank's ports: when a transfer could start and when it would be over.

A rank has, per class of link, one port that sends and one that receives; each carries one
transfer at a time at the speed of the link, and ports do not disturb each other. This is the
model behind the order of a plan and behind its predicted time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.links import Link, link_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.links import LinkSpeeds, Location


class PortClock:
    """locations: of every rank, by number. All times in seconds from the start."""

    def __init__(self, locations: Sequence[Location], speeds: LinkSpeeds) -> None:
        self._locations = locations
        self._seconds = {link: speeds.seconds(link, 1) for link in Link}
        self.sends_from = {link: [0.0] * len(locations) for link in Link}
        self.receives_from = {link: [0.0] * len(locations) for link in Link}
        """By class and rank: when that port is free."""

    def transfer(self, source: int, target: int, num_bytes: int, ready: float) -> float:
        """Occupy both ports with one transfer and return its end.

        ready: when the source has the bytes.
        """
        link = link_between(self._locations[source], self._locations[target])
        sends, receives = self.sends_from[link], self.receives_from[link]
        end = max(sends[source], receives[target], ready) + num_bytes * self._seconds[link]
        sends[source] = receives[target] = end
        return end

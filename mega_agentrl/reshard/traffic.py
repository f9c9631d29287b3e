"""What a plan costs: bytes per rank and class of link, the least possible, a predicted time.

lower bound   a byte that a machine wants and does not hold has to enter it once: counted
              from the regions, so it holds for any plan
prediction    the hops in the plan's order on one port per rank and class (`port_clock`);
              start-up of messages and the engines' own packing are not in it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.reshard.links import Link, LinkSpeeds, link_between
from mega_agentrl.reshard.port_clock import PortClock

if TYPE_CHECKING:
    from mega_agentrl.reshard.delivery import DeliveryPlan
    from mega_agentrl.reshard.links import Location


@dataclass(frozen=True, slots=True)
class Traffic:
    """sent, received: bytes by class of link, then by rank. seconds: predicted.
    least_network_bytes: the lower bound.
    """

    num_sources: int
    least_network_bytes: int
    sent: dict[Link, list[int]]
    received: dict[Link, list[int]]
    seconds: float

    def total(self, link: Link) -> int:
        """Bytes over all links of a class."""
        return sum(self.sent[link])

    def received_by(self, rank: int) -> int:
        """Bytes that one rank gets in all."""
        return sum(line[rank] for line in self.received.values())

    def sent_by_trainer(self) -> int:
        """Bytes that trainer ranks send, copies on one device aside."""
        return sum(
            sum(line[: self.num_sources])
            for link, line in self.sent.items()
            if link is not Link.same_gpu
        )

    def describe(self) -> str:
        """A few lines for logs: largest and total per class, predicted time."""
        lines = []
        for link in Link:
            sent, received = self.sent[link], self.received[link]
            lines.append(
                f"{link:<10} {sum(sent) / 2**30:12.3f} GiB in all, per rank at most "
                f"{max(sent) / 2**30:9.3f} sent, {max(received) / 2**30:9.3f} received"
            )
        bound = f"{'at least':<10} {self.least_network_bytes / 2**30:12.3f} GiB over the network"
        return "\n".join([*lines, bound, f"predicted  {self.seconds:12.3f} s"])


def count_traffic(
    plan: DeliveryPlan, locations: Sequence[Location], speeds: LinkSpeeds | None = None
) -> Traffic:
    """Follow all hops of a plan."""
    clock = PortClock(locations, speeds or LinkSpeeds())
    sent = {link: [0] * plan.world_size for link in Link}
    received = {link: [0] * plan.world_size for link in Link}
    end = 0.0
    for bucket in plan.buckets:
        ready: dict[int, float] = {}
        for source, target in bucket.hops:
            link = link_between(locations[source], locations[target])
            sent[link][source] += bucket.num_bytes
            received[link][target] += bucket.num_bytes
            since = ready.get(source, 0.0)
            ready[target] = clock.transfer(source, target, bucket.num_bytes, since)
        end = max(end, *ready.values())
    return Traffic(plan.num_sources, plan.least_network_bytes, sent, received, end)

"""Traffic of a plan: bytes per rank and link type, their lower bound, and a predicted duration.

lower bound   a byte that a machine needs and does not hold has to enter it once; counted from the
              regions, so it holds for any plan
prediction    the hops in the plan's order on one port per rank and link type (`link_simulator`),
              without message latency and without the engines' own packing of weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.reshard.planner.link_simulator import LinkSimulator
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.transfer_plan import TransferPlan
    from mega_agentrl.reshard.topology import RankLocation


@dataclass(frozen=True, slots=True)
class TransferTraffic:
    """Bytes and predicted duration of a plan."""

    num_trainer_ranks: int
    min_network_bytes: int
    """Lower bound on the bytes between machines."""
    sent_bytes: dict[LinkType, list[int]]
    """Bytes sent, by link type and rank."""
    received_bytes: dict[LinkType, list[int]]
    """Bytes received, by link type and rank."""
    predicted_s: float
    """Predicted duration of the update."""

    def total_bytes(self, link: LinkType) -> int:
        """Return the bytes over all links of a type."""
        return sum(self.sent_bytes[link])

    def received_bytes_of(self, rank: int) -> int:
        """Return the bytes that one rank receives in all."""
        return sum(by_rank[rank] for by_rank in self.received_bytes.values())

    def trainer_sent_bytes(self) -> int:
        """Return the bytes that trainer ranks send, without copies on one device."""
        return sum(
            sum(by_rank[: self.num_trainer_ranks])
            for link, by_rank in self.sent_bytes.items()
            if link is not LinkType.same_gpu
        )

    def summary(self) -> str:
        """Return a few lines for logs: totals and maxima per link type, and predicted duration."""
        lines = []
        for link in LinkType:
            sent, received = self.sent_bytes[link], self.received_bytes[link]
            lines.append(
                f"{link:<10} {sum(sent) / 2**30:12.3f} GiB in all, per rank at most "
                f"{max(sent) / 2**30:9.3f} sent, {max(received) / 2**30:9.3f} received"
            )
        bound = f"{'at least':<10} {self.min_network_bytes / 2**30:12.3f} GiB over the network"
        return "\n".join([*lines, bound, f"predicted  {self.predicted_s:12.3f} s"])


def count_traffic(
    plan: TransferPlan, locations: Sequence[RankLocation], speeds: LinkSpeeds | None = None
) -> TransferTraffic:
    """Follow all hops of a plan and add up their bytes."""
    simulator = LinkSimulator(locations, speeds or LinkSpeeds())
    sent = {link: [0] * plan.world_size for link in LinkType}
    received = {link: [0] * plan.world_size for link in LinkType}
    end = 0.0
    for bucket in plan.buckets:
        ready: dict[int, float] = {}
        for source, target in bucket.hops:
            link = link_type_between(locations[source], locations[target])
            sent[link][source] += bucket.num_bytes
            received[link][target] += bucket.num_bytes
            since = ready.get(source, 0.0)
            ready[target] = simulator.transfer(source, target, bucket.num_bytes, since)
        end = max(end, *ready.values())
    return TransferTraffic(plan.num_trainer_ranks, plan.min_network_bytes, sent, received, end)

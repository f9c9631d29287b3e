"""Traffic of a plan: bytes per rank and link type, their lower bound, and a predicted duration.

lower bound   a byte that a machine needs and does not hold has to enter it once; counted from the
              regions, so it holds for any plan
prediction    the hops in the plan's order (`LinkSimulator`), without message latency and without
              the engines' own packing of weights

In `LinkSimulator` a rank has, per link type, one port that sends and one that receives. Each port
carries one transfer at a time at the speed of the link, and ports do not affect each other. The
order of a plan comes from the same simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.transfer_plan import TransferPlan
    from mega_agentrl.reshard.topology import RankLocation


class LinkSimulator:
    """Tracks when each port is free; all times are seconds from the start."""

    def __init__(self, locations: Sequence[RankLocation], speeds: LinkSpeeds) -> None:
        self._locations = locations
        self._seconds_per_byte = {link: speeds.transfer_s(link, 1) for link in LinkType}
        self.send_free_at_s = {link: [0.0] * len(locations) for link in LinkType}
        """Time at which the sending port is free, by link type and rank."""
        self.receive_free_at_s = {link: [0.0] * len(locations) for link in LinkType}
        """Time at which the receiving port is free, by link type and rank."""
        self.sent_bytes = {link: [0] * len(locations) for link in LinkType}
        self.received_bytes = {link: [0] * len(locations) for link in LinkType}

    def transfer(
        self, source: int, target: int, num_bytes: int, ready_at_s: dict[int, float]
    ) -> float:
        """Occupy both ports with one transfer and return its end.

        Args:
            source: Sending rank.
            target: Receiving rank.
            num_bytes: Size of the transfer.
            ready_at_s: Time at which each rank has the bytes, 0 if absent. The target is added.
        """
        link = link_type_between(self._locations[source], self._locations[target])
        sends, receives = self.send_free_at_s[link], self.receive_free_at_s[link]
        start = max(sends[source], receives[target], ready_at_s.get(source, 0.0))
        end = start + num_bytes * self._seconds_per_byte[link]
        sends[source] = receives[target] = ready_at_s[target] = end
        self.sent_bytes[link][source] += num_bytes
        self.received_bytes[link][target] += num_bytes
        return end


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
    transport_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the name of the transport that carries them; empty if not known."""

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
        carried = [f"by {name}: {count} bytes" for name, count in self.transport_bytes.items()]
        return "\n".join([*lines, bound, *carried, f"predicted  {self.predicted_s:12.3f} s"])


def count_traffic(
    plan: TransferPlan, locations: Sequence[RankLocation], speeds: LinkSpeeds | None = None
) -> TransferTraffic:
    """Simulate all hops of a plan."""
    simulator = LinkSimulator(locations, speeds or LinkSpeeds())
    end = 0.0
    for bucket in plan.buckets:
        ready_at_s: dict[int, float] = {}
        for source, target in bucket.hops:
            end = max(end, simulator.transfer(source, target, bucket.num_bytes, ready_at_s))
    return TransferTraffic(
        plan.num_trainer_ranks,
        plan.min_network_bytes,
        simulator.sent_bytes,
        simulator.received_bytes,
        end,
    )

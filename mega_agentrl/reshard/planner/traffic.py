"""Traffic of a plan: bytes per rank and link type, their lower bound, and a predicted duration.

lower bound   a byte that a machine needs and does not hold has to enter it once; counted from the
              regions, so it holds for any plan
open modules  a rollout rank keeps a module twice from its first slice to its last
prediction    the hops in the plan's order, without message latency and without the engines' own
              packing of weights

In the simulation a rank has, per link type, one port that sends and one that receives. Each port
carries one transfer at a time at the speed of the link, and ports do not affect each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES, ParamSliceIndex
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout
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
    num_peers: list[int]
    """By rank, the ranks that it sends to plus the ranks that it receives from."""
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

    def max_peers(self) -> int:
        """Return the maximum of `num_peers`."""
        return max(self.num_peers)

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
        by_transport = [f"by {name}: {count} bytes" for name, count in self.transport_bytes.items()]
        predicted = f"predicted  {self.predicted_s:12.3f} s"
        peers = f"peers      {self.max_peers():12d} at most"
        return "\n".join([*lines, bound, *by_transport, predicted, peers])


def count_traffic(
    plan: TransferPlan, locations: Sequence[RankLocation], speeds: LinkSpeeds | None = None
) -> TransferTraffic:
    """Simulate all hops of a plan."""
    speeds = speeds or LinkSpeeds()
    sent_bytes = {link: [0] * len(locations) for link in LinkType}
    received_bytes = {link: [0] * len(locations) for link in LinkType}
    routes, bytes_of = _routes(plan, locations)
    for route, num_bytes in zip(routes.values(), bytes_of.values(), strict=True):
        for source, target, link in route:
            sent_bytes[link][source] += num_bytes
            received_bytes[link][target] += num_bytes
    return TransferTraffic(
        plan.num_trainer_ranks,
        plan.min_network_bytes,
        sent_bytes,
        received_bytes,
        _simulate(plan, routes, len(locations), speeds),
        _count_peers(routes.values(), len(locations)),
    )


def _count_peers(routes: Iterable[Sequence[_LinkedHop]], num_ranks: int) -> list[int]:
    num_peers = [0] * num_ranks
    for source, target in {hop[:2] for route in routes for hop in route}:
        num_peers[source] += 1
        num_peers[target] += 1
    return num_peers


_LinkedHop = tuple[int, int, LinkType]


def _routes(
    plan: TransferPlan, locations: Sequence[RankLocation]
) -> tuple[dict[int, list[_LinkedHop]], dict[int, int]]:
    """Return hops with their link types, and bytes, by id of the hops, which buckets share."""
    routes: dict[int, list[_LinkedHop]] = {}
    bytes_of: dict[int, int] = {}
    for bucket in plan.buckets:
        key = id(bucket.hops)
        if key not in routes:
            routes[key] = [
                (source, target, link_type_between(locations[source], locations[target]))
                for source, target in bucket.hops
            ]
            bytes_of[key] = 0
        bytes_of[key] += bucket.num_bytes
    return routes, bytes_of


def _simulate(
    plan: TransferPlan,
    routes: Mapping[int, Sequence[_LinkedHop]],
    num_ranks: int,
    speeds: LinkSpeeds,
) -> float:
    """Return the seconds until the last transfer has ended."""
    send_free_at_s = {link: [0.0] * num_ranks for link in LinkType}
    receive_free_at_s = {link: [0.0] * num_ranks for link in LinkType}
    ports = {
        key: [
            (source, target, send_free_at_s[link], receive_free_at_s[link], link)
            for source, target, link in route
        ]
        for key, route in routes.items()
    }
    for bucket in plan.buckets:
        duration_s = {link: speeds.transfer_s(link, bucket.num_bytes) for link in LinkType}
        ready_at_s: dict[int, float] = {}
        for source, target, sends, receives, link in ports[id(bucket.hops)]:
            start = max(sends[source], receives[target], ready_at_s.get(source, 0.0))
            end = start + duration_s[link]
            sends[source] = receives[target] = ready_at_s[target] = end
    return max((max(ends) for ends in receive_free_at_s.values()), default=0.0)


def module_bytes(layout: Iterable[ShardLayout], item_bytes: int) -> dict[str, int]:
    """Return the bytes of every module of a rollout rank, padding included.

    The name of a module is the prefix of its parameters' names, such as
    `model.layers.0.mlp.experts`.
    """
    sizes: dict[str, int] = defaultdict(int)
    for shard in layout:
        sizes[_module_of(shard.name)] += prod(shard.shape) * item_bytes
    return sizes


def max_open_bytes(plan: TransferPlan, rank: int, layout: Sequence[ShardLayout]) -> int:
    """Return the peak bytes of a rollout rank's modules that have only arrived in part.

    A module gets memory with its first slice and is complete with its last one.
    """
    item_bytes = max(DTYPE_BYTES[dtype] for dtype in plan.dtype_of.values())
    sizes, index = module_bytes(layout, item_bytes), ParamSliceIndex(layout)
    num_missing: dict[str, int] = defaultdict(int)
    for shard in layout:
        num_missing[_module_of(shard.name)] += sum(b.local_rect.numel for b in shard.blocks)
    open_modules: set[str] = set()
    open_bytes = max_bytes = 0
    reaches_rank: dict[int, bool] = {}  # buckets share their hops
    for bucket in plan.buckets:
        key = id(bucket.hops)
        if key not in reaches_rank:
            reaches_rank[key] = any(hop.target == rank for hop in bucket.hops)
        if not reaches_rank[key]:
            continue
        for tensor_slice in bucket.slices:
            for param_slice in index.find(tensor_slice):
                module = _module_of(param_slice.param)
                if module not in open_modules:
                    open_modules.add(module)
                    open_bytes += sizes[module]
                    max_bytes = max(max_bytes, open_bytes)
                num_missing[module] -= param_slice.rect.numel
                if num_missing[module] == 0:
                    open_modules.remove(module)
                    open_bytes -= sizes[module]
    return max_bytes


def _module_of(param: str) -> str:
    return param.rpartition(".")[0]

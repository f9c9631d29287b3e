"""Broadcast trees: how each bucket gets from one trainer rank to all of its receivers.

    receiver on a GPU with a holder   copies from that holder
    machine with a holder             one receiver gets the bucket, from the holder unless a
                                      receiver has copied it, and forwards it to the others
    machine without a holder          one receiver gets the bucket over the network, from a rollout
                                      rank that has it or else from a trainer rank, and forwards it

Machines without a holder form a chain in a fixed order. While a machine forwards one bucket it
receives the next, so all of them stay busy.

So each byte enters a machine without a holder once, which is the minimum. A trainer rank sends a
byte once to every machine that has both holders and receivers, or once in all if there is no such
machine. Of several possible senders the nearest is chosen, and of those the one that has sent
least; receivers are chosen alike.

The order comes from a simulation (`LinkSimulator`): the next bucket is the one whose sender and
first receiver are both free earliest, so that trainer ranks do not queue up for one receiver while
others are idle.

All regions with the same holders and the same receivers take the same path and form one transfer
group. A group is split into buckets of at most the given size; larger regions are split along
their first dim. There are at least as many buckets as holders, so that replicas share the sending,
unless that would make buckets smaller than `MIN_BUCKET_BYTES`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.traffic import LinkSimulator
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice
from mega_agentrl.reshard.topology import LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import Ranks, TransferRegion
    from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation


MIN_BUCKET_BYTES = 2**20
"""Below this size, the cost per message outweighs sharing the work between replicas."""


@dataclass(slots=True)
class TransferGroup:
    """Slices that go from any of `holders` to all of `receivers`."""

    holders: Ranks
    receivers: Ranks
    num_bytes: int = 0
    slices: list[TensorSlice] = field(default_factory=list)


def group_regions(
    regions: Iterable[TransferRegion], item_bytes: Mapping[str, int]
) -> list[TransferGroup]:
    """Return the groups in the order of their first region.

    Args:
        regions: Regions of all tensors.
        item_bytes: Bytes per element, by tensor.
    """
    groups: dict[tuple[Ranks, Ranks], TransferGroup] = {}
    for region in regions:
        key = (region.holders, region.receivers)
        group = groups.get(key)
        if group is None:
            group = groups[key] = TransferGroup(*key)
        num_bytes = region.rect.numel * item_bytes[region.hf_name]
        group.num_bytes += num_bytes
        group.slices.append(TensorSlice(region.hf_name, region.rect, num_bytes))
    return list(groups.values())


def min_network_bytes(groups: Iterable[TransferGroup], locations: Sequence[RankLocation]) -> int:
    """Return the bytes that must at least cross between machines.

    Each byte that a machine needs and does not hold has to enter it once.
    """
    total = 0
    for group in groups:
        holder_nodes = {locations[rank].node for rank in group.holders}
        receiver_nodes = {locations[rank].node for rank in group.receivers}
        total += group.num_bytes * len(receiver_nodes - holder_nodes)
    return total


def split_into_buckets(
    group: TransferGroup, bucket_bytes: int
) -> Iterator[tuple[TensorSlice, ...]]:
    """Yield the slices of a group by bucket, each of at most `bucket_bytes` or one row."""
    bytes_per_holder = -(-group.num_bytes // len(group.holders))
    limit = min(bucket_bytes, max(bytes_per_holder, MIN_BUCKET_BYTES))
    bucket: list[TensorSlice] = []
    size = 0
    for tensor_slice in group.slices:
        for part in _split_slice(tensor_slice, limit):
            if bucket and size + part.num_bytes > limit:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append(part)
            size += part.num_bytes
    yield tuple(bucket)


def _split_slice(tensor_slice: TensorSlice, limit: int) -> Iterator[TensorSlice]:
    """Split a slice along its first dim into parts of at least one row."""
    if tensor_slice.num_bytes <= limit or not tensor_slice.rect.start:
        yield tensor_slice
        return
    rect = tensor_slice.rect
    first, last = rect.start[0], rect.stop[0]
    row_bytes = tensor_slice.num_bytes // (last - first)
    rows = max(1, limit // row_bytes)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        part = Rect((start, *rect.start[1:]), (stop, *rect.stop[1:]))
        yield TensorSlice(tensor_slice.hf_name, part, row_bytes * (stop - start))


@dataclass(frozen=True, slots=True)
class NodeTargets:
    """The receivers of a group on one machine."""

    holders: Ranks
    """Trainer ranks on the machine that hold the group."""
    receivers: Ranks
    """Rollout ranks on the machine that need the group."""
    same_gpu_pairs: tuple[tuple[int, int], ...]
    """(holder, receiver) pairs that share a device."""


@dataclass(frozen=True, slots=True)
class BroadcastTree:
    """The machines of a transfer group."""

    roots: Ranks
    """Holders, one of which starts each bucket."""
    nodes_with_holder: tuple[NodeTargets, ...]
    """Machines with receivers and at least one holder."""
    nodes_without_holder: tuple[NodeTargets, ...]
    """Machines with receivers and no holder, in the order of the chain."""

    def first_hop(self) -> tuple[LinkType, Ranks]:
        """Return the link type of the first hop and the receivers it may target."""
        first = (self.nodes_with_holder or self.nodes_without_holder)[0]
        if first.same_gpu_pairs:
            return LinkType.same_gpu, tuple(receiver for _, receiver in first.same_gpu_pairs)
        return (LinkType.same_node if self.nodes_with_holder else LinkType.network), first.receivers


@dataclass(frozen=True, slots=True)
class PendingBucket:
    """A bucket that has a root but no position in the order yet."""

    tree: BroadcastTree
    root: int
    slices: tuple[TensorSlice, ...]
    num_bytes: int


def build_broadcast_tree(group: TransferGroup, locations: Sequence[RankLocation]) -> BroadcastTree:
    """Split the holders and receivers of a group by machine."""
    holders_by_node: dict[int, list[int]] = defaultdict(list)
    receivers_by_node: dict[int, list[int]] = defaultdict(list)
    for rank in group.holders:
        holders_by_node[locations[rank].node].append(rank)
    for rank in group.receivers:
        receivers_by_node[locations[rank].node].append(rank)
    nodes = []
    for node in sorted(receivers_by_node):
        holders = tuple(holders_by_node.get(node, ()))
        receivers = tuple(receivers_by_node[node])
        pairs = [
            (holder, receiver)
            for receiver in receivers
            for holder in holders
            if link_type_between(locations[holder], locations[receiver]) is LinkType.same_gpu
        ]
        # Of several holders on one device, the first sends.
        pair_of = {receiver: (holder, receiver) for holder, receiver in reversed(pairs)}
        same_gpu_pairs = tuple(pair_of[receiver] for receiver in sorted(pair_of))
        nodes.append(NodeTargets(holders, receivers, same_gpu_pairs))
    near = tuple(targets for targets in nodes if targets.holders)
    far = tuple(targets for targets in nodes if not targets.holders)
    near_holders = tuple(holder for targets in near for holder in targets.holders)
    return BroadcastTree(near_holders or group.holders, near, far)


def make_pending_buckets(
    groups: Iterable[TransferGroup], locations: Sequence[RankLocation], bucket_bytes: int
) -> list[PendingBucket]:
    """Split groups into buckets, and choose as the root of each the holder that sends least."""
    sent = [0] * len(locations)
    pending_buckets = []
    for group in groups:
        tree = build_broadcast_tree(group, locations)
        for slices in split_into_buckets(group, bucket_bytes):
            num_bytes = sum(tensor_slice.num_bytes for tensor_slice in slices)
            root = min(tree.roots, key=lambda rank: (sent[rank], rank))
            if tree.first_hop()[0] is not LinkType.same_gpu:
                sent[root] += num_bytes
            pending_buckets.append(PendingBucket(tree, root, slices, num_bytes))
    return pending_buckets


class RootQueue:
    """Pending buckets with the same first hop, by root; the root that is free first comes first.

    Of roots that are free at the same time, each queue prefers another one, according to its
    number, so that the queues do not compete for one root.
    """

    def __init__(
        self, number: int, link: LinkType, entries: Ranks, pending_buckets: Iterable[PendingBucket]
    ) -> None:
        self.link_type, self.entry_ranks = link, entries
        self._buckets_by_root: dict[int, deque[PendingBucket]] = defaultdict(deque)
        for pending in pending_buckets:
            self._buckets_by_root[pending.root].append(pending)
        roots = sorted(self._buckets_by_root)
        self._roots_by_free_time = [
            (0.0, (position - number) % len(roots), root) for position, root in enumerate(roots)
        ]
        heapq.heapify(self._roots_by_free_time)

    def __bool__(self) -> bool:
        return bool(self._roots_by_free_time)

    def send_ready_at_s(self, simulator: LinkSimulator) -> float:
        """Return the time at which the next root to send is free."""
        sends = simulator.send_free_at_s[self.link_type]
        while True:
            free, preference, root = self._roots_by_free_time[0]
            if free >= sends[root]:
                return free
            heapq.heapreplace(self._roots_by_free_time, (sends[root], preference, root))

    def pop(self) -> PendingBucket:
        """Remove and return the next bucket of that root."""
        root = self._roots_by_free_time[0][-1]
        pending = self._buckets_by_root[root].popleft()
        if not self._buckets_by_root[root]:
            heapq.heappop(self._roots_by_free_time)
        return pending


class BucketScheduler:
    """Assigns hops and an order to pending buckets; an instance serves one plan."""

    def __init__(self, locations: Sequence[RankLocation], speeds: LinkSpeeds) -> None:
        self._simulator = LinkSimulator(locations, speeds)
        self._sent_bytes = self._simulator.sent_bytes
        self._received_bytes = self._simulator.received_bytes
        self._ready_at_s: dict[int, float] = {}
        """Times at which the receivers of the bucket being scheduled have it."""

    def schedule(self, pending_buckets: Iterable[PendingBucket]) -> tuple[Bucket, ...]:
        """Return all buckets in execution order."""
        waiting: dict[tuple[LinkType, Ranks], list[PendingBucket]] = defaultdict(list)
        for pending in pending_buckets:
            waiting[pending.tree.first_hop()].append(pending)
        queues = [RootQueue(i, *hop, waiting[hop]) for i, hop in enumerate(waiting)]
        # Start times only grow. The first queue of the heap is therefore the earliest, unless its
        # own start time has grown since it was pushed.
        queue_heap = [(0.0, number, queue) for number, queue in enumerate(queues)]
        buckets: list[Bucket] = []
        while queue_heap:
            pushed_start, number, queue = heapq.heappop(queue_heap)
            start = max(self._receive_ready_at_s(queue), queue.send_ready_at_s(self._simulator))
            if start <= pushed_start:
                pending = queue.pop()
                hops = tuple(self._plan_hops(pending))
                buckets.append(Bucket(len(buckets), pending.num_bytes, pending.slices, hops))
            if queue:
                heapq.heappush(queue_heap, (start, number, queue))
        return tuple(buckets)

    def _receive_ready_at_s(self, queue: RootQueue) -> float:
        receives = self._simulator.receive_free_at_s[queue.link_type]
        return min(receives[rank] for rank in queue.entry_ranks)

    def _plan_hops(self, pending: PendingBucket) -> Iterator[Hop]:
        """Yield the hops in causal order."""
        senders: list[int] = []  # receivers on the machine visited last that have the bucket
        self._ready_at_s = {}
        for node in pending.tree.nodes_with_holder:
            senders = [receiver for _, receiver in node.same_gpu_pairs]
            for pair in node.same_gpu_pairs:
                yield self._add_hop(*pair, pending)
            if not senders:
                holders = [pending.root] if pending.root in node.holders else node.holders
                source = self._least_loaded(self._sent_bytes, LinkType.same_node, holders)
                senders = [
                    self._least_loaded(self._received_bytes, LinkType.same_node, node.receivers)
                ]
                yield self._add_hop(source, senders[0], pending)
            yield from self._broadcast_within_node(node, senders, pending)
        for node in pending.tree.nodes_without_holder:
            source = self._least_loaded(
                self._sent_bytes, LinkType.network, senders or [pending.root]
            )
            senders = [self._least_loaded(self._received_bytes, LinkType.network, node.receivers)]
            yield self._add_hop(source, senders[0], pending)
            yield from self._broadcast_within_node(node, senders, pending)

    def _broadcast_within_node(
        self, node: NodeTargets, senders: list[int], pending: PendingBucket
    ) -> Iterator[Hop]:
        """Yield hops to receivers of a machine that lack the bucket, and add them to `senders`."""
        for receiver in node.receivers:
            if receiver not in senders:
                yield self._add_hop(
                    self._least_loaded(self._sent_bytes, LinkType.same_node, senders),
                    receiver,
                    pending,
                )
                senders.append(receiver)

    def _add_hop(self, source: int, target: int, pending: PendingBucket) -> Hop:
        self._simulator.transfer(source, target, pending.num_bytes, self._ready_at_s)
        return Hop(source, target)

    def _least_loaded(
        self, counts: dict[LinkType, list[int]], link: LinkType, ranks: Iterable[int]
    ) -> int:
        by_rank = counts[link]
        return min(ranks, key=lambda rank: (by_rank[rank], rank))

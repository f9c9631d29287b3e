"""Broadcast trees: how each bucket gets from one trainer rank to all of its receivers.

    receiver on a GPU with a holder   copies from that holder
    machine with a holder             one receiver gets the bucket from the holder
    machine without a holder          one receiver, the entry, gets the bucket over the network from
                                      the entry of the machine before it, or from the trainer rank
    within a machine                  receivers pass the bucket on, each to the next

So each byte enters a machine without a holder once, which is the minimum. Machines form a chain;
while a machine forwards one bucket it receives the next, so all of them stay busy.

The number of peers of a rank is bounded, because a connection costs memory and time to set up:

    rails     the n-th receiver of a machine forwards to the n-th receiver of the next one
    senders   each rail gets a slice from one of the replicas that hold it: preferably from one that
              already sends to this rail, else from the one that sends least
    turns     the senders of a rail have turns, numbered in the order in which units need them
    heads     a rail gets the buckets of a turn at one machine, its head; the next machine becomes
              the head after `MAX_SENDERS_PER_RANK` turns

Buckets are ordered unit by unit (`transfer_groups`), because all ranks receive in the same order.
Within a unit each rail takes its buckets by turn. Rails begin with different senders, so that they
do not all need the same one, but change heads at the same turns: otherwise a bucket that one rail
passes on to another would come to its head last, and all later buckets would wait for it.

A machine can take its next bucket from a sender only after the buckets that arrive along the
chain. The chain of a bucket therefore goes from its head to the other heads of the unit in turn,
and then to the machines after them, so that a change of heads costs the time of one bucket.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from mega_agentrl.reshard.planner.transfer_groups import merge_units, split_into_buckets
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice
from mega_agentrl.reshard.topology import LinkType, link_type_between

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import Ranks
    from mega_agentrl.reshard.planner.transfer_groups import TransferGroup
    from mega_agentrl.reshard.topology import RankLocation


MIN_BUCKET_BYTES = 2**20
"""Below this size, the cost per message outweighs sharing the work between replicas."""
MAX_SENDERS_PER_RANK = 16
"""Trainer ranks that one rollout rank receives from, unless there are too few rollout ranks."""


Content = tuple[tuple[TensorSlice, ...], tuple[Hop, ...]]
"""Slices and hops of a bucket."""


@dataclass(frozen=True, slots=True)
class NodeTargets:
    """The receivers of a group on one machine."""

    node: int
    holders: Ranks
    """Trainer ranks on the machine that hold the group."""
    receivers: Ranks
    """Rollout ranks on the machine that need the group."""
    same_gpu_pairs: tuple[tuple[int, int], ...]
    """(holder, receiver) pairs that share a device."""

    def on_rail(self, rail: int) -> int:
        """Return the receiver on a rail."""
        return self.receivers[rail % len(self.receivers)]

    def hops_from(self, ranks: Sequence[int], rail: int) -> Iterator[Hop]:
        """Yield the hops by which `ranks`, which have a bucket, pass it to the next receivers."""
        start = self.receivers.index(ranks[rail % len(ranks)])
        ring = self.receivers[start:] + self.receivers[:start]
        for source, target in pairwise(ring):
            if target not in ranks:
                yield Hop(source, target)


@dataclass(frozen=True, slots=True)
class BroadcastTree:
    """The machines of all groups with the same holders and receivers."""

    roots: Ranks
    """Holders that may start a bucket."""
    nodes_with_holder: tuple[NodeTargets, ...]
    """Machines with receivers and at least one holder."""
    nodes_without_holder: tuple[NodeTargets, ...]
    """Machines with receivers and no holder."""

    @property
    def first_node(self) -> NodeTargets:
        """A machine that represents all machines that buckets may enter."""
        return (self.nodes_without_holder or self.nodes_with_holder)[0]

    def entry(self, sender: Sender) -> int:
        """Return the receiver on `first_node` at which a sender's buckets enter."""
        return self.first_node.on_rail(sender.rail)

    @property
    def enters_at_head(self) -> bool:
        """Whether senders reach the receivers over the network only."""
        return not self.nodes_with_holder

    def hops(self, route: Route, locations: Sequence[RankLocation]) -> tuple[Hop, ...]:
        """Return the hops of a bucket, in causal order."""
        source, rail = route.sender, route.rail
        hops: list[Hop] = []
        for node in self.nodes_with_holder:
            ranks = [receiver for _, receiver in node.same_gpu_pairs]
            hops += (Hop(*pair) for pair in node.same_gpu_pairs)
            if not ranks:
                ranks = [node.on_rail(rail)]
                holder = node.holders[rail % len(node.holders)]
                if route.sender in node.holders:
                    holder = route.sender
                hops.append(Hop(holder, ranks[0]))
            hops += node.hops_from(ranks, rail)
            if node.node == locations[route.sender].node:
                source = node.on_rail(rail)
        if self.nodes_with_holder:
            chain = self._nodes_after(locations[route.sender].node)
        else:
            chain = self._nodes_from_head(route)
        for node in chain:
            entry = node.on_rail(rail)
            hops.append(Hop(source, entry))
            hops += node.hops_from([entry], rail)
            source = entry
        return tuple(hops)

    def _nodes_after(self, node: int) -> list[NodeTargets]:
        nodes = self.nodes_without_holder
        return sorted(nodes, key=lambda targets: (targets.node < node, targets.node))

    def _nodes_from_head(self, route: Route) -> list[NodeTargets]:
        """Return the machines of the route's head, of the unit's other heads, and all others.

        If there are more machines than positions, neighbors share a position. The chains of all
        trees therefore visit the machines in the same order.
        """
        nodes, count, heads = self.nodes_without_holder, route.num_positions, route.unit_heads
        first = heads.index(route.head)
        positions = [(heads[-1] + 1 + step) % count for step in range(count)]
        others = [position for position in positions if position not in heads]
        return [
            targets
            for position in (*heads[first:], *heads[:first], *others)
            for targets in nodes[
                position * len(nodes) // count : (position + 1) * len(nodes) // count
            ]
        ]


class Route(NamedTuple):
    """The choices that determine the hops of a bucket in its tree."""

    sender: int
    rail: int
    head: int
    """Position of the first machine among `num_positions`."""
    unit_heads: tuple[int, ...]
    """Positions of the heads of all buckets of the unit."""
    num_positions: int


class Sender(NamedTuple):
    """A trainer rank that sends buckets of a group, and the rail that they take."""

    rank: int
    rail: int


def build_broadcast_tree(
    holders: Ranks, receivers: Ranks, locations: Sequence[RankLocation]
) -> BroadcastTree:
    """Split holders and receivers by machine."""
    holders_by_node: dict[int, list[int]] = defaultdict(list)
    receivers_by_node: dict[int, list[int]] = defaultdict(list)
    for rank in holders:
        holders_by_node[locations[rank].node].append(rank)
    for rank in receivers:
        receivers_by_node[locations[rank].node].append(rank)
    nodes = []
    for node in sorted(receivers_by_node):
        node_holders = tuple(holders_by_node.get(node, ()))
        targets = tuple(receivers_by_node[node])
        pairs = [
            (holder, receiver)
            for receiver in targets
            for holder in node_holders
            if link_type_between(locations[holder], locations[receiver]) is LinkType.same_gpu
        ]
        # Of several holders on one device, the first sends.
        pair_of = {receiver: (holder, receiver) for holder, receiver in reversed(pairs)}
        same_gpu_pairs = tuple(pair_of[receiver] for receiver in sorted(pair_of))
        nodes.append(NodeTargets(node, node_holders, targets, same_gpu_pairs))
    with_holder = tuple(targets for targets in nodes if targets.holders)
    without_holder = tuple(targets for targets in nodes if not targets.holders)
    near_holders = tuple(holder for targets in with_holder for holder in targets.holders)
    return BroadcastTree(near_holders or holders, with_holder, without_holder)


class BroadcastPlanner:
    """Chooses senders, rails and heads for the groups of one plan.

    Args:
        groups: Result of `group_regions`.
        locations: Locations of all ranks.
        bucket_bytes: Maximum size of a bucket, unless a single row is larger.
    """

    def __init__(
        self,
        groups: Iterable[TransferGroup],
        locations: Sequence[RankLocation],
        bucket_bytes: int,
    ) -> None:
        self._locations, self._bucket_bytes = locations, bucket_bytes
        self._units = merge_units(groups, bucket_bytes)
        self._trees: dict[tuple[Ranks, Ranks], BroadcastTree] = {}
        self._largest: Counter[tuple[Ranks, Ranks]] = Counter()
        for group in (group for unit in self._units for group in unit):
            key = (group.holders, group.receivers)
            if key not in self._trees:
                self._trees[key] = build_broadcast_tree(*key, locations)
            self._largest[key] = max(self._largest[key], group.num_bytes)
        self._senders: dict[tuple[Ranks, Ranks], tuple[Sender, ...]] = {}
        self._turns: dict[tuple[int, int], int] = {}
        """Turns of senders, by entry and sender. The entry, a rank of a first machine, stands for
        a rail."""
        self._num_turns = 0
        for unit in self._units:
            self._choose_senders(unit)
        at_head = [tree for tree in self._trees.values() if tree.enters_at_head]
        self._num_positions = min((len(tree.nodes_without_holder) for tree in at_head), default=1)
        self._num_heads = min(self._num_positions, -(-self._num_turns // MAX_SENDERS_PER_RANK))
        self._hops: dict[tuple[int, Route], tuple[Hop, ...]] = {}

    def make_buckets(self) -> tuple[Bucket, ...]:
        """Return all buckets in execution order."""
        buckets: list[Bucket] = []
        for unit in self._units:
            for slices, hops in self._order_unit(unit):
                num_bytes = sum(tensor_slice.num_bytes for tensor_slice in slices)
                buckets.append(Bucket(len(buckets), num_bytes, slices, hops))
        return tuple(buckets)

    def _choose_senders(self, unit: Sequence[TransferGroup]) -> None:
        """Choose senders for those groups of a unit whose holders and receivers are new."""
        if all((group.holders, group.receivers) in self._senders for group in unit):
            return
        entry_bytes: Counter[int] = Counter()
        for group in unit:
            targets = self._tree(group).first_node.receivers
            for rank in targets:
                entry_bytes[rank] += group.num_bytes // len(targets)
        # A sender that sends no more than a receiver gets anyway does not delay it.
        capacity = max(entry_bytes.values())
        sent_bytes: Counter[int] = Counter()
        entered_bytes: Counter[int] = Counter()
        pairs = set(self._turns)
        for group in sorted(unit, key=lambda group: len(self._tree(group).roots)):
            key, tree = (group.holders, group.receivers), self._tree(group)
            if key not in self._senders:
                self._senders[key] = self._choose_group_senders(
                    key, sent_bytes, entered_bytes, capacity, pairs
                )
            for sender in self._senders[key]:
                share = group.num_bytes // len(self._senders[key])
                entry = tree.entry(sender)
                sent_bytes[sender.rank] += share
                entered_bytes[entry] += share
                pairs.add((entry, sender.rank))
        self._number_turns(sorted(pairs - self._turns.keys()))

    def _choose_group_senders(
        self,
        key: tuple[Ranks, Ranks],
        sent_bytes: Counter[int],
        entered_bytes: Counter[int],
        capacity: int,
        pairs: Collection[tuple[int, int]],
    ) -> tuple[Sender, ...]:
        """Choose as many senders as there are rails, each for another rail."""
        tree, num_bytes = self._trees[key], self._largest[key]
        targets = tree.first_node.receivers
        count = min(len(tree.roots), len(targets), max(1, num_bytes // MIN_BUCKET_BYTES))
        share = num_bytes // count
        rails = sorted(range(len(targets)), key=lambda rail: (entered_bytes[targets[rail]], rail))
        senders: list[Sender] = []
        unused_ranks = list(tree.roots)
        for rail in rails[:count]:
            connected_ranks = [
                rank
                for rank in unused_ranks
                if (targets[rail], rank) in pairs and sent_bytes[rank] + share <= capacity
            ]
            rank = min(connected_ranks or unused_ranks, key=lambda rank: (sent_bytes[rank], rank))
            senders.append(Sender(rank, rail))
            unused_ranks.remove(rank)
        return tuple(senders)

    def _number_turns(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give turns to the new senders of every entry; entries begin with different senders."""
        ranks_of = {
            entry: [rank for _, rank in entry_pairs]
            for entry, entry_pairs in groupby(pairs, key=lambda pair: pair[0])
        }
        for number, (entry, ranks) in enumerate(ranks_of.items()):
            start = number * len(ranks) // len(ranks_of)
            for turn, rank in enumerate(ranks[start:] + ranks[:start], self._num_turns):
                self._turns[entry, rank] = turn
        self._num_turns += max(map(len, ranks_of.values()), default=0)

    def _order_unit(self, unit: Sequence[TransferGroup]) -> Iterator[Content]:
        """Yield the contents of the buckets of a unit, in order."""
        turns = {self._turn(group, s) for group in unit for s in self._senders_of(group)}
        heads = tuple(sorted({self._head(turn) for turn in turns}))
        queues: dict[int, list[tuple[tuple[bool, int], int, Content]]] = defaultdict(list)
        for group in unit:
            tree, senders = self._tree(group), self._senders_of(group)
            num_shares = min(len(senders), max(1, group.num_bytes // MIN_BUCKET_BYTES))
            for number, slices in enumerate(
                split_into_buckets(group, self._bucket_bytes, num_shares)
            ):
                sender = senders[number % len(senders)]
                turn = self._turn(group, sender)
                content = (slices, self._hops_of(tree, sender, self._head(turn), heads))
                num_bytes = sum(tensor_slice.num_bytes for tensor_slice in slices)
                queues[tree.entry(sender)].append(((tree.enters_at_head, turn), num_bytes, content))
        # The bytes that an entry receives before a bucket stand for the time at which it is sent.
        order: list[tuple[int, int, Content]] = []
        for entry, queue in sorted(queues.items()):
            received = 0
            for _, num_bytes, content in sorted(queue, key=lambda item: item[0]):
                order.append((received, entry, content))
                received += num_bytes
        for *_, content in sorted(order, key=lambda item: item[:2]):
            yield content

    def _hops_of(
        self, tree: BroadcastTree, sender: Sender, head: int, unit_heads: tuple[int, ...]
    ) -> tuple[Hop, ...]:
        """Return the hops of a route; equal routes share one tuple."""
        route = Route(*sender, head, unit_heads, self._num_positions)
        key = (id(tree), route)
        hops = self._hops.get(key)
        if hops is None:
            hops = self._hops[key] = tree.hops(route, self._locations)
        return hops

    def _turn(self, group: TransferGroup, sender: Sender) -> int:
        return self._turns[self._tree(group).entry(sender), sender.rank]

    def _head(self, turn: int) -> int:
        """Return the position of the machine at which the buckets of a turn enter."""
        return turn * self._num_heads // self._num_turns

    def _senders_of(self, group: TransferGroup) -> tuple[Sender, ...]:
        return self._senders[group.holders, group.receivers]

    def _tree(self, group: TransferGroup) -> BroadcastTree:
        return self._trees[group.holders, group.receivers]

"""The way of every bucket: from one trainer rank to the first takers, from those to the others.

    on a device with a holder   the taker copies from it
    on a machine with a holder  one taker gets the bucket from it, or from one that has copied,
                                and the others from their fellows
    on any other machine        one taker gets the bucket over the network and passes it on;
                                who sends over the network is a taker that has it, and only if
                                there is none yet, a trainer rank

Machines without a holder form a chain, always in the same order: while one passes a bucket on,
it gets the next, so that all of them are busy all the time and each sends a byte once.

So a machine that holds no copy is entered once per byte, which is the least possible, and a
trainer rank sends a byte once to each machine that holds it, or once in all. Of several holders
the one sends that is nearest and has sent least, and of several takers too.

The order is that of a simulation (`port_clock`): next comes the bucket whose sender and first
taker are both free earliest, so that trainer ranks do not queue up in front of one taker while
others wait.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.reshard.delivery import Bucket, Hop
from mega_agentrl.reshard.lanes import fill
from mega_agentrl.reshard.links import Link, link_between
from mega_agentrl.reshard.port_clock import PortClock

if TYPE_CHECKING:
    from mega_agentrl.reshard.delivery import Piece
    from mega_agentrl.reshard.lanes import Lane
    from mega_agentrl.reshard.links import LinkSpeeds, Location
    from mega_agentrl.reshard.regions import Ranks


@dataclass(frozen=True, slots=True)
class Stop:
    """The takers of a lane on one machine; copies: with the holder on the same device."""

    holders: Ranks
    takers: Ranks
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Way:
    """A lane on its machines. roots: holders of which one starts a bucket; near: machines with
    a holder, far: without.
    """

    roots: Ranks
    near: tuple[Stop, ...]
    far: tuple[Stop, ...]

    def entrance(self) -> tuple[Link, Ranks]:
        """The link of the first hop, and the takers of which one is its target."""
        first = (self.near or self.far)[0]
        if first.copies:
            return Link.same_gpu, tuple(taker for _, taker in first.copies)
        return (Link.same_node if self.near else Link.network), first.takers


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket that has a starting rank but no place in the order yet."""

    way: Way
    root: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def find_way(lane: Lane, locations: Sequence[Location]) -> Way:
    """Split takers and holders by machine."""
    holders: dict[int, list[int]] = defaultdict(list)
    takers: dict[int, list[int]] = defaultdict(list)
    for rank in lane.holders:
        holders[locations[rank].node].append(rank)
    for rank in lane.takers:
        takers[locations[rank].node].append(rank)
    stops = []
    for node in sorted(takers):
        copies = [
            (holder, taker)
            for taker in takers[node]
            for holder in holders.get(node, ())
            if link_between(locations[holder], locations[taker]) is Link.same_gpu
        ]
        # Replicas on one device: the first serves.
        first = {taker: (holder, taker) for holder, taker in reversed(copies)}
        copied = tuple(first[taker] for taker in sorted(first))
        stops.append(Stop(tuple(holders.get(node, ())), tuple(takers[node]), copied))
    near = tuple(stop for stop in stops if stop.holders)
    far = tuple(stop for stop in stops if not stop.holders)
    local = tuple(holder for stop in near for holder in stop.holders)
    return Way(local or lane.holders, near, far)


def make_parcels(
    lanes: Iterable[Lane], locations: Sequence[Location], bucket_bytes: int
) -> list[Parcel]:
    """Cut lanes into buckets and choose who starts each: of the nearest, who sends least."""
    sent = [0] * len(locations)
    parcels = []
    for lane in lanes:
        way = find_way(lane, locations)
        for pieces in fill(lane, bucket_bytes):
            num_bytes = sum(piece.num_bytes for piece in pieces)
            root = min(way.roots, key=lambda rank: (sent[rank], rank))
            if way.entrance()[0] is not Link.same_gpu:
                sent[root] += num_bytes
            parcels.append(Parcel(way, root, pieces, num_bytes))
    return parcels


class Line:
    """Parcels with the same entrance, by root; roots by the time at which they are free.

    Of equally free roots each line prefers another one, by its number, so that they do not all
    want the same.
    """

    def __init__(self, number: int, link: Link, entries: Ranks, parcels: Iterable[Parcel]) -> None:
        self.link, self.entries = link, entries
        self._parcels_of: dict[int, deque[Parcel]] = defaultdict(deque)
        for parcel in parcels:
            self._parcels_of[parcel.root].append(parcel)
        roots = sorted(self._parcels_of)
        self._roots = [
            (0.0, (position - number) % len(roots), root) for position, root in enumerate(roots)
        ]
        heapq.heapify(self._roots)

    def __bool__(self) -> bool:
        return bool(self._roots)

    def ready_to_send(self, clock: PortClock) -> float:
        """When the first root is free, which is then the next to send."""
        sends = clock.sends_from[self.link]
        while True:
            free, preference, root = self._roots[0]
            if free >= sends[root]:
                return free
            heapq.heapreplace(self._roots, (sends[root], preference, root))

    def take(self) -> Parcel:
        """The next parcel of that root."""
        root = self._roots[0][-1]
        parcel = self._parcels_of[root].popleft()
        if not self._parcels_of[root]:
            heapq.heappop(self._roots)
        return parcel


class Dispatcher:
    """Gives parcels their hops and their order. One use."""

    def __init__(self, locations: Sequence[Location], speeds: LinkSpeeds) -> None:
        self._locations = locations
        self._clock = PortClock(locations, speeds)
        self._sent = {link: [0] * len(locations) for link in Link}
        self._received = {link: [0] * len(locations) for link in Link}
        self._ready: dict[int, float] = {}
        """When the takers of the present bucket have it."""

    def dispatch(self, parcels: Iterable[Parcel]) -> tuple[Bucket, ...]:
        """All buckets in order."""
        waiting: dict[tuple[Link, Ranks], list[Parcel]] = defaultdict(list)
        for parcel in parcels:
            waiting[parcel.way.entrance()].append(parcel)
        lines = [Line(i, *entrance, waiting[entrance]) for i, entrance in enumerate(waiting)]
        # Keys only ever grow, so a key that is still right at the top of the heap is the least.
        next_up = [(0.0, number, line) for number, line in enumerate(lines)]
        buckets: list[Bucket] = []
        while next_up:
            key, number, line = heapq.heappop(next_up)
            start = max(self._ready_to_receive(line), line.ready_to_send(self._clock))
            if start <= key:
                parcel = line.take()
                hops = tuple(self._hops(parcel))
                buckets.append(Bucket(len(buckets), parcel.num_bytes, parcel.pieces, hops))
            if line:
                heapq.heappush(next_up, (start, number, line))
        return tuple(buckets)

    def _ready_to_receive(self, line: Line) -> float:
        receives = self._clock.receives_from[line.link]
        return min(receives[rank] for rank in line.entries)

    def _hops(self, parcel: Parcel) -> Iterator[Hop]:
        """In causal order: `having` are the takers of the last machine that have the bucket."""
        having: list[int] = []
        self._ready = {}
        for stop in parcel.way.near:
            having = [taker for _, taker in stop.copies]
            for copy in stop.copies:
                yield self._hop(*copy, parcel)
            if not having:
                local = [parcel.root] if parcel.root in stop.holders else stop.holders
                source = self._least(self._sent, Link.same_node, local)
                having = [self._least(self._received, Link.same_node, stop.takers)]
                yield self._hop(source, having[0], parcel)
            yield from self._share(stop, having, parcel)
        for stop in parcel.way.far:
            source = self._least(self._sent, Link.network, having or [parcel.root])
            having = [self._least(self._received, Link.network, stop.takers)]
            yield self._hop(source, having[0], parcel)
            yield from self._share(stop, having, parcel)

    def _share(self, stop: Stop, having: list[int], parcel: Parcel) -> Iterator[Hop]:
        """Takers of a machine that have the bucket pass it on to those that have not."""
        for taker in stop.takers:
            if taker not in having:
                yield self._hop(self._least(self._sent, Link.same_node, having), taker, parcel)
                having.append(taker)

    def _hop(self, source: int, target: int, parcel: Parcel) -> Hop:
        link = link_between(self._locations[source], self._locations[target])
        self._sent[link][source] += parcel.num_bytes
        self._received[link][target] += parcel.num_bytes
        since = self._ready.get(source, 0.0)
        self._ready[target] = self._clock.transfer(source, target, parcel.num_bytes, since)
        return Hop(source, target)

    def _least(self, counts: dict[Link, list[int]], link: Link, ranks: Iterable[int]) -> int:
        line = counts[link]
        return min(ranks, key=lambda rank: (line[rank], rank))

"""Carries out one rank's part of a plan: writes, sends, receives, passes on, lands.

    trainer rank    courier.send(shards, version)
    rollout rank    courier.receive(landing, version)

A rank walks through its buckets in the plan's order with two slots of memory: while one bucket
is on its way, the next is written or already expected. A rollout rank that passes a bucket on
does so from the slot in which it came. Frames of END close an update for every pair of ranks,
so that a bucket that is lost or sent twice shows within the same update.

Consumes: shards, or frames of peers. Produces: frames, or values at their places. Waits for:
peers of its hops. Unblocked by: them, their death, or the deadline of each wait. All ranks walk
at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.reshard.frames import (
    HEADER_BYTES,
    Frames,
    check_header,
    frame_bytes,
    write_end,
)
from mega_agentrl.types.doing import WAIT_S, doing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan, Place
    from mega_agentrl.reshard.frames import Copy
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.wire.ends import Arrival, Departure, Wire

NUM_SLOTS = 2


class Landing(Protocol):
    """Takes what arrives."""

    def write(self, place: Place, values: torch.Tensor) -> None:
        """Put values, shaped like the place's rectangle, where they belong; they are copied."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One bucket's way through a rank. source: None where the rank holds the bucket."""

    bucket: Bucket
    source: int | None
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CourierReport:
    """Bytes of frames, and seconds from the first to the last."""

    sent_bytes: int
    received_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Goods:
    """What a trainer rank sends, see `Courier.send`."""

    shards: Mapping[str, torch.Tensor]
    copy: Copy | None


@dataclass(slots=True)
class _Load:
    """A leg that has a slot."""

    leg: Leg
    slot: torch.Tensor
    arrival: Arrival | None
    departures: list[tuple[int, Departure]]


def legs_of(plan: DeliveryPlan, rank: int) -> list[Leg]:
    """All legs of a rank, in the plan's order."""
    ways: dict[int, tuple[Bucket, list[int], list[int]]] = {}
    for bucket, (source, target) in plan.hops_of(rank):
        _, sources, targets = ways.setdefault(bucket.index, (bucket, [], []))
        if target == rank:
            sources.append(source)
        else:
            targets.append(target)
    legs = []
    for bucket, sources, targets in ways.values():
        assert len(sources) <= 1, "a checked plan brings a bucket to a rank once"
        legs.append(Leg(bucket, sources[0] if sources else None, tuple(targets)))
    return legs


class Courier:
    """One rank's; lives as long as the link."""

    def __init__(
        self,
        plan: DeliveryPlan,
        rank: int,
        wire: Wire,
        layout: Sequence[ShardLayout],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._left = False
        self._wire = wire
        self._timeout_s = timeout_s
        self._frames = Frames(plan, layout)
        self._legs = legs_of(plan, rank)
        for leg in self._legs:
            if leg.source is None or rank >= plan.num_sources:
                self._frames.parts(leg.bucket)  # a plan from other layouts shows now
        sizes = [frame_bytes(leg.bucket) for leg in self._legs]
        self._slots = wire.slots(NUM_SLOTS, max([HEADER_BYTES, *sizes]))
        self._targets = sorted({target for leg in self._legs for target in leg.targets})
        self._sources = sorted({leg.source for leg in self._legs if leg.source is not None})

    def send(
        self, shards: Mapping[str, torch.Tensor], version: int, copy: Copy | None = None
    ) -> CourierReport:
        """A trainer rank's part. shards: its parameters by the names in its layout. copy: how
        their values get into frames. Raises as `receive`.
        """
        with self._leaving():
            return self._walk(version, _Goods(shards, copy), None)

    def receive(self, landing: Landing, version: int) -> CourierReport:
        """A rollout rank's part.

        Raises `ValueError` for a frame that is not the one expected and `RuntimeError` for a peer
        that is gone or late, both naming the ranks, the bucket and its first tensor. This rank
        has left the link then.
        """
        with self._leaving():
            return self._walk(version, _Goods({}, None), landing)

    def sources_of(self, hf_name: str) -> dict[int, list[int]]:
        """From which ranks pieces of a tensor come to this one, with the numbers of buckets."""
        found: dict[int, list[int]] = {}
        for leg in self._legs:
            if leg.source is not None and any(p.hf_name == hf_name for p in leg.bucket.pieces):
                found.setdefault(leg.source, []).append(leg.bucket.index)
        return found

    def close(self) -> None:
        """Leave the link; peers that still wait for this rank fail at once."""
        self._left = True
        self._wire.close()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """A rank that fails leaves at once, so that no peer waits for it until the deadline."""
        if self._left:
            raise RuntimeError(
                f"weight transfer: rank {self.rank} has left this link, expected a new one; "
                "probable cause: an update that failed"
            )
        try:
            yield
        except (RuntimeError, ValueError):
            self.close()
            raise

    def _walk(self, version: int, goods: _Goods, landing: Landing | None) -> CourierReport:
        try:
            return self._carry(version, goods, landing)
        except Exception:
            self.close()  # else peers wait for this rank until their deadlines
            raise

    def _carry(self, version: int, goods: _Goods, landing: Landing | None) -> CourierReport:
        start_s = time.perf_counter()
        free = list(self._slots)
        loads: deque[_Load] = deque()
        for leg in self._legs:
            if not free:
                free.append(self._finish(loads.popleft(), version, landing))
            loads.append(self._start(leg, free.pop(), version, goods))
        while loads:
            free.append(self._finish(loads.popleft(), version, landing))
        self._close_update(free, version)
        sizes = [(frame_bytes(leg.bucket), leg) for leg in self._legs]
        return CourierReport(
            sent_bytes=sum(size * len(leg.targets) for size, leg in sizes),
            received_bytes=sum(size for size, leg in sizes if leg.source is not None),
            seconds=time.perf_counter() - start_s,
        )

    def _start(self, leg: Leg, slot: torch.Tensor, version: int, goods: _Goods) -> _Load:
        if leg.source is not None:
            with self._named("receive", leg.source, leg.bucket):
                room = self._room(slot, frame_bytes(leg.bucket))
                return _Load(leg, slot, self._wire.receive(room, leg.source), [])
        frame = self._frames.write(leg.bucket, slot, goods.shards, version, goods.copy)
        return _Load(leg, slot, None, self._send_all(leg, frame))

    def _finish(self, load: _Load, version: int, landing: Landing | None) -> torch.Tensor:
        """Do what is left to do for a leg; returns its slot."""
        leg = load.leg
        if load.arrival is not None and leg.source is not None:
            assert landing is not None, "trainer ranks only send"
            with self._named("receive", leg.source, leg.bucket):
                frame = load.arrival.wait(self._timeout_s)
                check_header(frame, version, leg.bucket)
            load.departures = self._send_all(leg, frame[: frame_bytes(leg.bucket)])
            for place, values in self._frames.read(leg.bucket, frame):
                landing.write(place, values)
        for target, departure in load.departures:
            with self._named("send", target, leg.bucket):
                departure.wait(self._timeout_s)
        if load.arrival is not None:
            load.arrival.done()
        return load.slot

    def _send_all(self, leg: Leg, frame: torch.Tensor) -> list[tuple[int, Departure]]:
        departures = []
        for target in leg.targets:
            with self._named("send", target, leg.bucket):
                departures.append((target, self._wire.send(frame, target)))
        return departures

    def _room(self, slot: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """What of a slot to receive into: all, unless the wire wants to know the size."""
        return slot[:num_bytes] if self._wire.exact else slot

    def _close_update(self, slots: list[torch.Tensor], version: int) -> None:
        """Exchange ENDs with all peers."""
        outgoing, incoming = slots
        frame = write_end(outgoing, version)
        departures = []
        for target in self._targets:
            with self._named("send", target, None):
                departures.append((target, self._wire.send(frame, target)))
        for source in self._sources:
            with self._named("receive", source, None):
                arrival = self._wire.receive(self._room(incoming, HEADER_BYTES), source)
                check_header(arrival.wait(self._timeout_s), version, None)
                arrival.done()
        for target, departure in departures:
            with self._named("send", target, None):
                departure.wait(self._timeout_s)

    @contextmanager
    def _named(self, operation: str, peer: int, bucket: Bucket | None) -> Iterator[None]:
        """Say who failed at what: a peer that is gone shows at the start or in the wait."""
        try:
            what = f"weight transfer, {operation}"
            with doing(what, f"rank {peer} of the link", bound_s=WAIT_S):
                yield
        except (RuntimeError, ValueError) as error:
            what = "the end of the update"
            if bucket is not None:
                first = bucket.pieces[0]
                what = f"bucket {bucket.index} (from {first.hf_name} {first.rect})"
            way = "receive from" if operation == "receive" else "send to"
            raise type(error)(
                f"weight transfer: rank {self.rank} could not {way} rank {peer} {what}, deadline "
                f"{self._timeout_s:g} s: {error}"
            ) from error

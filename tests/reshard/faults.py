"""Faults injected into a weight transfer, and what exactly they hit.

A fault hits one rank: on the transport, when it sends its n-th frame, or in what it was told when
it joined. Every fault changes something that is sent: if a choice would change nothing (equal
values of two tensors), the next one that does is taken; if there is none, that is an error.

    flip      one bit of the values          foreign   the values of the other tensor rank
    old       the values of the last update  stale     a header of the last version
    drop      the frame is not sent          twice     sent again
    reorder   after the next to that rank    astray    exchanged with the next to another rank
    kill      the process ends instead of sending it
    plan      the rank has another plan: two slices exchanged (or one shifted), another target, or
              a missing bucket, by the value of `bit`
    names     the rank's layout has the names of two tensors exchanged
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.reshard.executor import routes_of_rank
from mega_agentrl.reshard.frames import HEADER_BYTES, FrameCodec, num_frame_bytes
from mega_agentrl.reshard.layout import Block

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import Bucket, TransferPlan

CONTENT_FAULTS = ("flip", "foreign", "old")
FRAME_FAULTS = ("drop", "twice", "stale", "reorder", "astray", "kill")
TRANSPORT_FAULTS = CONTENT_FAULTS + FRAME_FAULTS
TOLD_FAULTS = ("plan", "names")

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """kind: see the module. rank: whom it hits. frame: the how-many-th of the frames that can be
    hit, or of the entries. bit: of the values in the frame; both modulo their number.
    """

    kind: str
    rank: int
    frame: int = 0
    bit: int = 0

    def spoil(
        self, rank: int, plan: TransferPlan, layout: list[ShardLayout]
    ) -> tuple[TransferPlan, list[ShardLayout]]:
        """What the rank is told when it joins."""
        if rank == self.rank and self.kind == "plan":
            return _with_wrong_entry(plan, self), layout
        if rank == self.rank and self.kind == "names":
            return plan, _with_swapped_names(plan, layout, self)
        return plan, layout


@dataclass(frozen=True, slots=True)
class Hit:
    """What a fault has changed. names: tensors whose bytes are not what they should be, or that
    stand first in a bucket that is lost or wrong as a whole. targets: ranks that get it.
    """

    names: frozenset[str]
    buckets: frozenset[int]
    targets: frozenset[int]


def cut(layout: Sequence[ShardLayout], tensors: Values) -> dict[str, torch.Tensor]:
    """The shards of a layout; padding is zero."""
    shards = {}
    for shard in layout:
        local = torch.zeros(shard.shape)
        for block in shard.blocks:
            values = tensors[block.hf_name][block.hf_rect.slices]
            local[block.local_rect.slices] = values.reshape(block.local_rect.shape)
        shards[shard.name] = local
    return shards


def sends_of(plan: TransferPlan, rank: int) -> list[tuple[Bucket, int]]:
    """Frames that a rank sends, with their targets, in its order."""
    return [
        (route.bucket, target) for route in routes_of_rank(plan, rank) for target in route.targets
    ]


def can_hit(kind: str, rank: int, plan: TransferPlan) -> bool:
    """Whether the rank sends a frame that one of FRAME_FAULTS can take."""
    return bool(_positions(kind, sends_of(plan, rank)))


def _positions(kind: str, sends: Sequence[tuple[Bucket, int]]) -> list[int]:
    return [at for at in range(len(sends)) if kind != "astray" or _exchanged(sends, at)]


def aimed(fault: Fault, plan: TransferPlan) -> tuple[int, Hit]:
    """Which frame one of FRAME_FAULTS takes, and what it hits."""
    sends = sends_of(plan, fault.rank)
    at = _pick(_positions(fault.kind, sends), fault)
    other = _exchanged(sends, at) if fault.kind == "astray" else None
    return at, _hit_of([sends[at], sends[other]] if other else [sends[at]])


def _hit_of(sends: Sequence[tuple[Bucket, int]]) -> Hit:
    return Hit(
        frozenset(bucket.slices[0].hf_name for bucket, _ in sends),
        frozenset(bucket.index for bucket, _ in sends),
        frozenset(target for _, target in sends),
    )


def _exchanged(sends: Sequence[tuple[Bucket, int]], at: int) -> int | None:
    """The next frame to another rank, if neither is larger than the slot it then comes to: gloo
    would end the process.
    """
    bucket, target = sends[at]
    later = range(at + 1, len(sends))
    other = next((position for position in later if sends[position][1] != target), None)
    if other is None or sends[other][0].index == bucket.index:
        return None
    room = {to: max(num_frame_bytes(b) for b, t in sends if t == to) for _, to in sends}
    fits = num_frame_bytes(bucket) <= room[sends[other][1]]
    return other if fits and num_frame_bytes(sends[other][0]) <= room[target] else None


def _pick(choices: Sequence[Any], fault: Fault) -> Any:
    if not choices:
        raise AssertionError(f"{fault} has nothing to hit")
    return choices[fault.frame % len(choices)]


@contextmanager
def inject(
    fault: Fault, rank: int, executor: Any, plan: TransferPlan, spoilers: Mapping[str, Values]
) -> Iterator[Hit | None]:
    """While the executor works; yields what will be hit. spoilers: shards to take values from,
    besides the right ones under `right`, by kind of fault.
    """
    if rank != fault.rank or fault.kind not in TRANSPORT_FAULTS:
        yield None
        return
    spoil: Callable[..., torch.Tensor] | None = None
    if fault.kind in CONTENT_FAULTS:
        at, hit, spoil = _aim_at_content(fault, executor, plan, spoilers)
    else:
        at, hit = aimed(fault, plan)
    transport = executor._transport
    executor._transport = FaultyTransport(transport, fault.kind, at, spoil)
    try:
        yield hit
    finally:
        fired, executor._transport = executor._transport.fired, transport
    if not fired:
        raise AssertionError(f"{fault} has hit nothing")


def _aim_at_content(
    fault: Fault, executor: Any, plan: TransferPlan, spoilers: Mapping[str, Values]
) -> tuple[int, Hit, Callable[..., torch.Tensor]]:
    sends, frames = sends_of(plan, fault.rank), executor._codec

    def spoil(bucket: Bucket, frame: torch.Tensor) -> torch.Tensor:
        if fault.kind == "flip":
            return _flipped(frames.batch(bucket).parts, frame, fault.bit)
        spoiled = frames.write(bucket, frame.clone(), spoilers[fault.kind], 0)
        spoiled[:HEADER_BYTES] = frame[:HEADER_BYTES]
        return spoiled

    found = []
    for at, (bucket, target) in enumerate(sends):
        right = torch.zeros(num_frame_bytes(bucket), dtype=torch.uint8)
        if "right" in spoilers:
            frames.write(bucket, right, spoilers["right"], 0)
        if names := _changed(frames.batch(bucket).parts, right, spoil(bucket, right)):
            found.append((at, Hit(names, frozenset([bucket.index]), frozenset([target]))))
    at, hit = _pick(found, fault)
    return at, hit, lambda frame: spoil(sends[at][0], frame)


def _changed(parts: Sequence[Any], one: torch.Tensor, two: torch.Tensor) -> frozenset[str]:
    return frozenset(
        p.tensor_slice.hf_name for p in parts if not torch.equal(one[p.span], two[p.span])
    )


def _flipped(parts: Sequence[Any], frame: torch.Tensor, bit: int) -> torch.Tensor:
    """One bit of a value, never of the padding between slices."""
    spoiled = frame.clone()
    bit %= 8 * sum(part.tensor_slice.num_bytes for part in parts)
    for part in parts:
        if bit < 8 * part.tensor_slice.num_bytes:
            spoiled[part.span][bit // 8] ^= 1 << bit % 8
            return spoiled
        bit -= 8 * part.tensor_slice.num_bytes
    raise AssertionError("the bit lies in no piece")


class NeverSent:
    """Send handle of a frame that is not sent."""

    def wait(self, timeout_s: float) -> None:
        pass


@dataclass
class FaultyTransport:
    """Spoils the frame with this number on its way out, or keeps it back for the next."""

    transport: Any
    kind: str
    at: int
    spoil: Callable[..., torch.Tensor] | None
    fired: bool = False
    num_sent: int = 0
    held_back: tuple[torch.Tensor, int] | None = None
    saved: list[Any] = field(default_factory=list)
    """gloo gives up a send that nobody holds."""

    def send(self, frame: torch.Tensor, peer: int) -> Any:
        hit = self.num_sent == self.at
        self.num_sent += 1
        if hit:
            return self._hit(frame, peer)
        if self.held_back is None or (self.kind == "reorder") != (self.held_back[1] == peer):
            return self.transport.send(frame, peer)
        (held, first), self.held_back = self.held_back, None
        self.fired = True
        # reorder: this one to its own rank, then the held one; astray: each to the other's rank
        to, back = (peer, first) if self.kind == "reorder" else (first, peer)
        self.saved.append(self.transport.send(frame.clone(), to))
        return self.transport.send(held, back)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def _hit(self, frame: torch.Tensor, peer: int) -> Any:
        if self.kind in ("reorder", "astray"):
            self.held_back = (frame.clone(), peer)
            return NeverSent()
        self.fired = True
        if self.kind == "kill":
            os._exit(9)
        if self.kind == "drop":
            return NeverSent()
        if self.kind == "twice":
            self.saved.append(self.transport.send(frame.clone(), peer))
        elif self.kind == "stale":
            frame = frame.clone()
            frame[:HEADER_BYTES].view(torch.int64)[1] -= 1
        elif self.spoil is not None:
            frame = self.spoil(frame)
        return self.transport.send(frame, peer)


def told_hit(
    rank: int,
    right: tuple[TransferPlan, Sequence[ShardLayout]],
    told: tuple[TransferPlan, Sequence[ShardLayout]],
    shards: Values,
) -> Hit:
    """What one of TOLD_FAULTS changes in what a rank sends. right, told: plan and layout.

    Raises `ValueError` where the rank cannot do what it was told.
    """
    ours, theirs = ({(b.index, t): b for b, t in sends_of(p, rank)} for p, _ in (right, told))
    both = ours.keys() & theirs.keys()
    hit = _hit_of([(b, key[1]) for key, b in (ours | theirs).items() if key not in both])
    names, buckets, targets = set(hit.names), set(hit.buckets), set(hit.targets)
    good, wrong = FrameCodec(*right), FrameCodec(*told)
    for key in both:
        one, two = (torch.zeros(num_frame_bytes(ours[key]), dtype=torch.uint8) for _ in "12")
        good.write(ours[key], one, shards, 0)
        wrong.write(theirs[key], two, shards, 0)
        if changed := _changed(good.batch(ours[key]).parts, one, two):
            names |= changed
            buckets.add(key[0])
            targets.add(key[1])
    if not names:
        raise AssertionError("the fault changes nothing")
    return Hit(frozenset(names), frozenset(buckets), frozenset(targets))


def _with_wrong_entry(plan: TransferPlan, fault: Fault) -> TransferPlan:
    mine = [bucket for bucket, _ in sends_of(plan, fault.rank)]
    bucket = _pick(mine, fault)
    wrong: Bucket | None
    wrong = (_with_wrong_piece, _with_other_target, _gone)[fault.bit % 3](plan, bucket, fault.rank)
    before, after = plan.buckets[: bucket.index], plan.buckets[bucket.index + 1 :]
    return replace(plan, buckets=(*before, wrong, *after) if wrong else (*before, *after))


def _with_wrong_piece(plan: TransferPlan, bucket: Bucket, rank: int) -> Bucket:
    """Two slices of one shape exchanged or, in a bucket without, one that is shifted."""
    slices = list(bucket.slices)
    for one in range(len(slices)):
        for two in range(one + 1, len(slices)):
            if slices[one].rect.shape == slices[two].rect.shape:
                slices[one], slices[two] = slices[two], slices[one]
                return replace(bucket, slices=tuple(slices))
    rect = slices[0].rect
    by_one = rect.translate((0,) * len(rect.start), (1, *(0,) * (len(rect.start) - 1)))
    return replace(bucket, slices=(slices[0]._replace(rect=by_one), *slices[1:]))


def _with_other_target(plan: TransferPlan, bucket: Bucket, rank: int) -> Bucket | None:
    """To a rank that should not get it from this one, if its slots are large enough."""
    taking = {hop.target for hop in bucket.hops}
    for other in plan.rollout_ranks:
        room = max(num_frame_bytes(route.bucket) for route in routes_of_rank(plan, other))
        if other not in taking and num_frame_bytes(bucket) <= room:
            hops = [h if h.source != rank else h._replace(target=other) for h in bucket.hops]
            return replace(bucket, hops=tuple(hops))
    return None


def _gone(plan: TransferPlan, bucket: Bucket, rank: int) -> None:
    return None


def _with_swapped_names(
    plan: TransferPlan, layout: list[ShardLayout], fault: Fault
) -> list[ShardLayout]:
    """Two tensors of the same rectangle, in one parameter or two, exchange their names."""
    sent = {
        tensor_slice.hf_name
        for bucket, _ in sends_of(plan, fault.rank)
        for tensor_slice in bucket.slices
    }
    blocks = [block for shard in layout for block in shard.blocks]
    pairs = [
        (one.hf_name, two.hf_name)
        for index, one in enumerate(blocks)
        for two in blocks[index + 1 :]
        if one.hf_rect == two.hf_rect and one.hf_name != two.hf_name and one.hf_name in sent
    ]
    one, two = _pick(pairs, fault)
    swapped = {one: two, two: one}
    return [
        replace(
            shard,
            blocks=tuple(
                Block(swapped.get(b.hf_name, b.hf_name), b.hf_rect, b.local_rect)
                for b in shard.blocks
            ),
        )
        for shard in layout
    ]

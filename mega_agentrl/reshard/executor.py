"""Executes one rank's part of a plan: packs, sends, receives, forwards and writes weights.

    trainer rank    executor.send(shards, version)
    rollout rank    executor.receive(writer, version)

A rank processes its buckets in the plan's order with two slots of memory: while one bucket is in
transit, the next is packed or already expected. Small buckets that a rank sends share a slot. A
rollout rank forwards a bucket from the slot in which it arrived. End frames close an update for
every pair of ranks, so that a bucket that is lost or sent twice is detected within the same update.

Consumes: shards, or frames of peers. Produces: frames, or values written to parameters. Waits for:
peers of its hops. Unblocked by: those peers, their death, or the deadline of each wait. All ranks
execute at the same time.
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
    FrameCodec,
    check_header,
    num_frame_bytes,
    write_end_frame,
)
from mega_agentrl.reshard.layout import round_up
from mega_agentrl.types.activity import WAIT_OVERDUE_S, track_activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mega_agentrl.reshard.frames import CopyFn, PartBatch
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import Bucket, TransferPlan
    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport

NUM_SLOTS = 2
"""Buffers for buckets in transit, per rank."""
MAX_FRAMES_PER_SLOT = 4
"""Few enough that a peer need not read control messages while this rank sends others."""
_FRAME_ALIGN_BYTES = 64


class WeightWriter(Protocol):
    """Receives the weights that arrive at a rollout rank."""

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        """Copy all parts of a frame to where they belong."""


@dataclass(frozen=True, slots=True)
class Route:
    """The path of one bucket through a rank."""

    bucket: Bucket
    source: int | None
    """Rank that sends the bucket to this one, or None if this rank holds it."""
    targets: tuple[int, ...]
    """Ranks that this rank sends the bucket to."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Statistics of one rank's transfers in an update."""

    sent_bytes: int
    """Bytes of the frames sent."""
    received_bytes: int
    """Bytes of the frames received."""
    duration_s: float
    """Seconds from the first frame to the last."""


@dataclass(frozen=True, slots=True)
class _SendBuffers:
    """Shards that a trainer rank sends, and the function that copies and digests them."""

    shards: Mapping[str, torch.Tensor]
    copy_fn: CopyFn | None


class FrameSlots:
    """Assigns frames to slots.

    Args:
        slots: Buffers, each at least as large as any frame.
        is_shared: Whether a slot may hold several frames, so that a small frame does not keep the
            next large one waiting. Slots to receive into may not, because a frame that arrives
            instead of the expected one may be larger.
    """

    def __init__(self, slots: Sequence[torch.Tensor], *, is_shared: bool) -> None:
        self._slots = slots
        self._limit = MAX_FRAMES_PER_SLOT if is_shared else 1
        self._num_frames = [0] * len(slots)
        self._last = 0
        self._num_used_bytes = 0
        """Bytes that are used in slot `_last`."""

    def take(self, num_bytes: int) -> tuple[int, torch.Tensor] | None:
        """Return the index of a slot and its free part, or None if frames must finish first."""
        start = round_up(self._num_used_bytes, _FRAME_ALIGN_BYTES)
        has_room = start + num_bytes <= self._slots[self._last].numel()
        if not (0 < self._num_frames[self._last] < self._limit and has_room):
            if 0 not in self._num_frames:
                return None
            self._last, start = self._num_frames.index(0), 0
        self._num_used_bytes = start + num_bytes
        self._num_frames[self._last] += 1
        return self._last, self._slots[self._last][start:]

    def give_back(self, index: int) -> None:
        """Declare that a frame in a slot is finished."""
        self._num_frames[index] -= 1


@dataclass(slots=True)
class _InFlightBucket:
    """A route that occupies a slot or a part of it."""

    route: Route
    slot_index: int
    recv_handle: RecvHandle | None
    send_handles: list[tuple[int, SendHandle]]


def routes_of_rank(plan: TransferPlan, rank: int) -> list[Route]:
    """Return all routes of a rank, in the plan's order."""
    by_bucket: dict[int, tuple[Bucket, list[int], list[int]]] = {}
    for bucket, (source, target) in plan.hops_of(rank):
        _, sources, targets = by_bucket.setdefault(bucket.index, (bucket, [], []))
        if target == rank:
            sources.append(source)
        else:
            targets.append(target)
    routes = []
    for bucket, sources, targets in by_bucket.values():
        assert len(sources) <= 1, "a checked plan brings a bucket to a rank once"
        routes.append(Route(bucket, sources[0] if sources else None, tuple(targets)))
    return routes


class TransferExecutor:
    """Executes the updates of one rank, for as long as the session lasts.

    Raises `ValueError` if the plan was made from another layout.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        transport: Transport,
        layout: Sequence[ShardLayout],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._is_closed = False
        self._transport = transport
        self._timeout_s = timeout_s
        self._codec = FrameCodec(plan, layout)
        self._routes = routes_of_rank(plan, rank)
        for route in self._routes:
            if route.source is None or rank >= plan.num_trainer_ranks:
                self._codec.batch(route.bucket)  # raises now if the plan is from other layouts
        sizes = [num_frame_bytes(route.bucket) for route in self._routes]
        self._slots = transport.allocate_slots(NUM_SLOTS, max([HEADER_BYTES, *sizes]))
        self._targets = sorted({target for route in self._routes for target in route.targets})
        self._sources = sorted({route.source for route in self._routes if route.source is not None})

    def send(
        self, shards: Mapping[str, torch.Tensor], version: int, copy_fn: CopyFn | None = None
    ) -> TransferReport:
        """Execute a trainer rank's part; raises the same errors as `receive`.

        Args:
            shards: Parameters by the names in the rank's layout.
            version: Weight version.
            copy_fn: Copies parameter values to frames; by default a plain copy.
        """
        with self._close_on_error():
            return self._run(version, _SendBuffers(shards, copy_fn), None)

    def receive(self, writer: WeightWriter, version: int) -> TransferReport:
        """Execute a rollout rank's part.

        On an error this rank leaves the session. The message names the ranks, the bucket and its
        first tensor.

        Raises:
            ValueError: If a frame is not the expected one.
            RuntimeError: If a peer is gone or late.
        """
        with self._close_on_error():
            return self._run(version, _SendBuffers({}, None), writer)

    def sources_of(self, hf_name: str) -> dict[int, list[int]]:
        """Return the ranks that send slices of a tensor to this one, with their bucket indices."""
        buckets_by_source: dict[int, list[int]] = {}
        for route in self._routes:
            if route.source is not None and any(p.hf_name == hf_name for p in route.bucket.slices):
                buckets_by_source.setdefault(route.source, []).append(route.bucket.index)
        return buckets_by_source

    def close(self) -> None:
        """Leave the session; peers that still wait for this rank fail at once."""
        self._is_closed = True
        self._transport.close()

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Leave the session on an error, so that no peer waits for this rank until the deadline."""
        if self._is_closed:
            raise RuntimeError(
                f"weight transfer: rank {self.rank} has left this session, expected a new one; "
                "probable cause: an update that failed"
            )
        try:
            yield
        except Exception:
            self.close()
            raise

    def _run(
        self, version: int, send_buffers: _SendBuffers, writer: WeightWriter | None
    ) -> TransferReport:
        start_s = time.perf_counter()
        slots = FrameSlots(self._slots, is_shared=writer is None)
        in_flight: deque[_InFlightBucket] = deque()
        for route in self._routes:
            while (place := slots.take(num_frame_bytes(route.bucket))) is None:
                slots.give_back(self._finish_bucket(in_flight.popleft(), version, writer))
            in_flight.append(self._start_bucket(route, *place, version, send_buffers))
        while in_flight:
            self._finish_bucket(in_flight.popleft(), version, writer)
        self._exchange_end_frames(self._slots, version)
        sizes = [(num_frame_bytes(route.bucket), route) for route in self._routes]
        return TransferReport(
            sent_bytes=sum(size * len(route.targets) for size, route in sizes),
            received_bytes=sum(size for size, route in sizes if route.source is not None),
            duration_s=time.perf_counter() - start_s,
        )

    def _start_bucket(
        self,
        route: Route,
        slot_index: int,
        slot: torch.Tensor,
        version: int,
        send_buffers: _SendBuffers,
    ) -> _InFlightBucket:
        if route.source is not None:
            with self._describe_failure("receive", route.source, route.bucket):
                buffer = self._receive_buffer(slot, num_frame_bytes(route.bucket))
                handle = self._transport.receive(buffer, route.source)
                return _InFlightBucket(route, slot_index, handle, [])
        frame = self._codec.write(
            route.bucket, slot, send_buffers.shards, version, send_buffers.copy_fn
        )
        return _InFlightBucket(route, slot_index, None, self._send_to_targets(route, frame))

    def _finish_bucket(
        self, in_flight: _InFlightBucket, version: int, writer: WeightWriter | None
    ) -> int:
        """Complete a bucket and return the index of its slot."""
        route = in_flight.route
        if in_flight.recv_handle is not None and route.source is not None:
            assert writer is not None, "trainer ranks only send"
            with self._describe_failure("receive", route.source, route.bucket):
                frame = in_flight.recv_handle.wait(self._timeout_s)
                check_header(frame, version, route.bucket)
            in_flight.send_handles = self._send_to_targets(
                route, frame[: num_frame_bytes(route.bucket)]
            )
            writer.write(self._codec.batch(route.bucket), frame)
        for target, handle in in_flight.send_handles:
            with self._describe_failure("send", target, route.bucket):
                handle.wait(self._timeout_s)
        if in_flight.recv_handle is not None:
            in_flight.recv_handle.release()
        return in_flight.slot_index

    def _send_to_targets(self, route: Route, frame: torch.Tensor) -> list[tuple[int, SendHandle]]:
        handles = []
        for target in route.targets:
            with self._describe_failure("send", target, route.bucket):
                handles.append((target, self._transport.send(frame, target)))
        return handles

    def _receive_buffer(self, slot: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return the part of a slot to receive into: all of it, unless the exact size is needed."""
        return slot[:num_bytes] if self._transport.needs_exact_size else slot

    def _exchange_end_frames(self, slots: list[torch.Tensor], version: int) -> None:
        """Exchange end frames with all peers."""
        outgoing, incoming = slots
        frame = write_end_frame(outgoing, version)
        send_handles = []
        for target in self._targets:
            with self._describe_failure("send", target, None):
                send_handles.append((target, self._transport.send(frame, target)))
        for source in self._sources:
            with self._describe_failure("receive", source, None):
                recv_handle = self._transport.receive(
                    self._receive_buffer(incoming, HEADER_BYTES), source
                )
                check_header(recv_handle.wait(self._timeout_s), version, None)
                recv_handle.release()
        for target, send_handle in send_handles:
            with self._describe_failure("send", target, None):
                send_handle.wait(self._timeout_s)

    @contextmanager
    def _describe_failure(self, operation: str, peer: int, bucket: Bucket | None) -> Iterator[None]:
        """Add the ranks and the bucket to the error of a transfer."""
        try:
            what = f"weight transfer, {operation}"
            with track_activity(
                what, f"rank {peer} of the session", overdue_after_s=WAIT_OVERDUE_S
            ):
                yield
        except (RuntimeError, ValueError) as error:
            what = "the end of the update"
            if bucket is not None:
                first = bucket.slices[0]
                what = f"bucket {bucket.index} (from {first.hf_name} {first.rect})"
            action = "receive from" if operation == "receive" else "send to"
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(
                f"weight transfer: rank {self.rank} could not {action} rank {peer} {what}, "
                f"deadline {self._timeout_s:g} s: {error}"
            ) from error

"""The usual way of the weights into an engine, as verl and slime go it, without their engines.

slime   every parameter is gathered over the tensor group of its pipeline stage; tensor rank 0
        of each stage turns it into whole Hugging Face tensors and broadcasts buckets of them to
        all rollout ranks
verl    before that, every parameter is broadcast over the pipeline group, so that all trainer
        ranks have everything; rank 0 alone broadcasts to the rollout ranks

Each rollout rank gets the whole model and hands bucket after bucket to the model's
`load_weights`, which takes its part, through vLLM's layerwise reload.

Where they differ from what is here, this is the faster way: whole tensors are assembled straight
in the bucket, by the rank that sends them alone; two buckets are under way at a time, the
stages of slime send at the same time, and the memory of the sender is allocated once. A bucket
has the size of one of ours, or of one parameter where that is larger.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from tools.reshard_bench.model import PIPELINE, TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.layout import ShardLayout

OURS = "ours"
BARE = "ours without proof"
PEERS = ("slime", "verl")
"""Paths."""
TIMEOUT = timedelta(seconds=120)
_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A Hugging Face tensor in a bucket. offset: bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """Its values; shares memory."""
        stop = self.offset + torch.Size(self.shape).numel() * _ITEM_BYTES
        return frame[self.offset : stop].view(torch.float32).view(self.shape)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket: whole tensors of some parameters of the stages. root: trainer rank that sends."""

    root: int
    params: tuple[tuple[int, str], ...]
    tensors: tuple[Tensor, ...]
    num_bytes: int


def schedule(
    peer: str,
    layouts: Sequence[Sequence[ShardLayout]],
    shapes: Mapping[str, tuple[int, ...]],
    bucket_bytes: int,
) -> list[Parcel]:
    """All buckets, in the order in which rollout ranks take them."""
    stages = [[(stage, shard) for shard in layouts[stage * TENSOR]] for stage in range(PIPELINE)]
    if peer == "verl":
        return list(_pack(0, list(chain(*stages)), shapes, bucket_bytes))
    lanes = [
        _pack(stage * TENSOR, shards, shapes, bucket_bytes) for stage, shards in enumerate(stages)
    ]
    return [parcel for row in zip_longest(*lanes) for parcel in row if parcel is not None]


def _pack(
    root: int,
    shards: Sequence[tuple[int, ShardLayout]],
    shapes: Mapping[str, tuple[int, ...]],
    bucket_bytes: int,
) -> Iterator[Parcel]:
    params: list[tuple[int, str]] = []
    tensors: list[Tensor] = []
    offset = 0
    for stage, shard in shards:
        names = list(dict.fromkeys(block.hf_name for block in shard.blocks))
        sizes = [torch.Size(shapes[name]).numel() * _ITEM_BYTES for name in names]
        if params and offset + sum(sizes) > bucket_bytes:
            yield Parcel(root, tuple(params), tuple(tensors), offset)
            params, tensors, offset = [], [], 0
        params.append((stage, shard.name))
        for name, size in zip(names, sizes, strict=True):
            tensors.append(Tensor(name, shapes[name], offset))
            offset += size
    yield Parcel(root, tuple(params), tuple(tensors), offset)


def _group(store: Store, key: str, ranks: Sequence[Any], me: Any) -> Any:
    return ProcessGroupGloo(PrefixStore(key, store), ranks.index(me), len(ranks), timeout=TIMEOUT)


class UsualSender:
    """A trainer rank. key: of this meeting at the store. num_sinks: rollout ranks."""

    def __init__(
        self,
        peer: str,
        rank: int,
        layouts: Sequence[Sequence[ShardLayout]],
        parcels: Sequence[Parcel],
        store: Store,
        key: str,
        num_sinks: int,
    ) -> None:
        self._peer, self._rank, self._layouts = peer, rank, layouts
        self._stage = rank // TENSOR
        self._shard_of = [{shard.name: shard for shard in layout} for layout in layouts]
        stage = [self._stage * TENSOR + other for other in range(TENSOR)]
        self._tensor = _group(store, f"{key}/tensor{self._stage}", stage, rank)
        line = [other * TENSOR + rank % TENSOR for other in range(PIPELINE)]
        self._pipeline = _group(store, f"{key}/pipeline{rank % TENSOR}", line, rank)
        # In slime a stage has nothing to do with the parameters of another.
        self._parcels = [p for p in parcels if peer == "verl" or p.root // TENSOR == self._stage]
        self._out = None
        if any(parcel.root == rank for parcel in parcels):
            self._out = _group(store, f"{key}/out{rank}", [rank, *_sinks(num_sinks)], rank)
            largest = max(parcel.num_bytes for parcel in self._parcels)
            self._slots = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def send(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Everything, to all rollout ranks."""
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        free = list(self._slots) if self._out else []
        for parcel in self._parcels:
            slot = None
            if self._out is not None:
                if not free:
                    work, done = under_way.popleft()
                    work.wait(TIMEOUT)
                    free.append(done)
                slot = free.pop()
            for stage, param in parcel.params:
                parts = self._gather(stage, param, shards)
                if slot is not None:
                    self._assemble(stage, param, parts, parcel, slot)
            if self._out is not None and slot is not None:
                frame = slot[: parcel.num_bytes]
                under_way.append((self._out.broadcast(frame, 0), slot))
        for work, _ in under_way:
            work.wait(TIMEOUT)

    def _gather(
        self, stage: int, param: str, shards: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """The shards of all tensor ranks; one where they are the same."""
        first, last = (self._shard_of[stage * TENSOR + rank][param] for rank in (0, TENSOR - 1))
        mine = shards[param] if stage == self._stage else torch.empty(first.shape)
        if self._peer == "verl":
            self._pipeline.broadcast(mine, stage).wait(TIMEOUT)
        if first.blocks == last.blocks:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(TENSOR)]
        self._tensor.allgather(parts, mine).wait(TIMEOUT)
        return parts

    def _assemble(
        self,
        stage: int,
        param: str,
        parts: Sequence[torch.Tensor],
        parcel: Parcel,
        slot: torch.Tensor,
    ) -> None:
        whole = {tensor.name: tensor.view(slot) for tensor in parcel.tensors}
        for rank, part in enumerate(parts):
            for block in self._shard_of[stage * TENSOR + rank][param].blocks:
                place = whole[block.hf_name][block.hf_rect.slices]
                place.copy_(part[block.local_rect.slices].reshape(place.shape))


class UsualReceiver:
    """A rollout rank. sink: its number among them."""

    def __init__(
        self, sink: int, parcels: Sequence[Parcel], store: Store, key: str, num_sinks: int
    ) -> None:
        self._parcels = parcels
        self._groups = {
            root: _group(store, f"{key}/out{root}", [root, *_sinks(num_sinks)], f"sink {sink}")
            for root in sorted({parcel.root for parcel in parcels})
        }
        self.received_bytes = sum(parcel.num_bytes for parcel in parcels)

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Named tensors, bucket by bucket, in fresh memory each: the loader keeps views of it."""
        under_way = deque(self._start(parcel) for parcel in self._parcels[:2])
        for number, parcel in enumerate(self._parcels):
            work, frame = under_way.popleft()
            work.wait(TIMEOUT)
            yield [(tensor.name, tensor.view(frame)) for tensor in parcel.tensors]
            del frame
            if number + 2 < len(self._parcels):
                under_way.append(self._start(self._parcels[number + 2]))

    def _start(self, parcel: Parcel) -> tuple[Any, torch.Tensor]:
        frame = torch.empty(parcel.num_bytes, dtype=torch.uint8)
        return self._groups[parcel.root].broadcast(frame, 0), frame


def _sinks(count: int) -> list[str]:
    return [f"sink {number}" for number in range(count)]

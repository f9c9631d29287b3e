"""Baselines: the weight update of verl and slime, without their engines.

slime   every parameter is gathered over the tensor group of its pipeline stage; tensor rank 0 of
        each stage converts it to whole Hugging Face tensors and broadcasts buckets of them to all
        rollout ranks
verl    the same, but every parameter is first broadcast over the pipeline group, so that every
        trainer rank has all of them, and rank 0 alone broadcasts to the rollout ranks

Each rollout rank receives the whole model and passes bucket after bucket to the model's
`load_weights` within vLLM's layerwise reload.

This version is faster than the originals in some points: whole tensors are assembled directly in
the bucket, and only by the rank that sends them; two buckets are in flight at a time, the stages of
slime send at the same time, and the sender's memory is allocated once. Buckets are as large as
those of our path, or as one parameter if that is larger.
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
OURS_WITHOUT_PROOF = "ours without proof"
BASELINES = ("slime", "verl")
"""Paths to compare with ours."""
TIMEOUT = timedelta(seconds=120)
_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """A Hugging Face tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First byte in the bucket."""

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """Return the values as a view of the bucket."""
        stop = self.offset + torch.Size(self.shape).numel() * _ITEM_BYTES
        return frame[self.offset : stop].view(torch.float32).view(self.shape)


@dataclass(frozen=True, slots=True)
class BaselineBucket:
    """Whole tensors of some parameters."""

    root: int
    """Trainer rank that sends the bucket."""
    params: tuple[tuple[int, str], ...]
    """(pipeline stage, parameter name) of the parameters."""
    tensors: tuple[BucketTensor, ...]
    num_bytes: int


def plan_buckets(
    baseline: str,
    layouts: Sequence[Sequence[ShardLayout]],
    shapes: Mapping[str, tuple[int, ...]],
    bucket_bytes: int,
) -> list[BaselineBucket]:
    """Return all buckets, in the order in which rollout ranks receive them."""
    stages = [[(stage, shard) for shard in layouts[stage * TENSOR]] for stage in range(PIPELINE)]
    if baseline == "verl":
        return list(_plan_rank_buckets(0, list(chain(*stages)), shapes, bucket_bytes))
    groups = [
        _plan_rank_buckets(stage * TENSOR, shards, shapes, bucket_bytes)
        for stage, shards in enumerate(stages)
    ]
    return [bucket for row in zip_longest(*groups) for bucket in row if bucket is not None]


def _plan_rank_buckets(
    root: int,
    shards: Sequence[tuple[int, ShardLayout]],
    shapes: Mapping[str, tuple[int, ...]],
    bucket_bytes: int,
) -> Iterator[BaselineBucket]:
    params: list[tuple[int, str]] = []
    tensors: list[BucketTensor] = []
    offset = 0
    for stage, shard in shards:
        names = list(dict.fromkeys(block.hf_name for block in shard.blocks))
        sizes = [torch.Size(shapes[name]).numel() * _ITEM_BYTES for name in names]
        if params and offset + sum(sizes) > bucket_bytes:
            yield BaselineBucket(root, tuple(params), tuple(tensors), offset)
            params, tensors, offset = [], [], 0
        params.append((stage, shard.name))
        for name, size in zip(names, sizes, strict=True):
            tensors.append(BucketTensor(name, shapes[name], offset))
            offset += size
    yield BaselineBucket(root, tuple(params), tuple(tensors), offset)


def _group(store: Store, key: str, members: Sequence[Any], member: Any) -> Any:
    rank = members.index(member)
    return ProcessGroupGloo(PrefixStore(key, store), rank, len(members), timeout=TIMEOUT)


class BaselineSender:
    """Sends the buckets of one trainer rank; `key` prefixes the keys of the groups in the store."""

    def __init__(
        self,
        baseline: str,
        rank: int,
        layouts: Sequence[Sequence[ShardLayout]],
        buckets: Sequence[BaselineBucket],
        store: Store,
        key: str,
        num_rollout_ranks: int,
    ) -> None:
        self._baseline, self._rank, self._layouts = baseline, rank, layouts
        self._stage = rank // TENSOR
        self._shard_of = [{shard.name: shard for shard in layout} for layout in layouts]
        tensor_ranks = [self._stage * TENSOR + other for other in range(TENSOR)]
        self._tensor_group = _group(store, f"{key}/tensor{self._stage}", tensor_ranks, rank)
        pipeline_ranks = [other * TENSOR + rank % TENSOR for other in range(PIPELINE)]
        self._pipeline_group = _group(store, f"{key}/pipeline{rank % TENSOR}", pipeline_ranks, rank)
        # In slime, a stage does not take part in sending the parameters of another.
        self._buckets = [
            bucket
            for bucket in buckets
            if baseline == "verl" or bucket.root // TENSOR == self._stage
        ]
        self._broadcast_group = None
        if any(bucket.root == rank for bucket in buckets):
            self._broadcast_group = _group(
                store, f"{key}/out{rank}", [rank, *_rollout_names(num_rollout_ranks)], rank
            )
            largest = max(bucket.num_bytes for bucket in self._buckets)
            self._slots = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def send(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Send all buckets to all rollout ranks."""
        in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        free_slots = list(self._slots) if self._broadcast_group else []
        for bucket in self._buckets:
            slot = None
            if self._broadcast_group is not None:
                if not free_slots:
                    work, sent_slot = in_flight.popleft()
                    work.wait(TIMEOUT)
                    free_slots.append(sent_slot)
                slot = free_slots.pop()
            for stage, param in bucket.params:
                tensor_shards = self._gather(stage, param, shards)
                if slot is not None:
                    self._assemble(stage, param, tensor_shards, bucket, slot)
            if self._broadcast_group is not None and slot is not None:
                frame = slot[: bucket.num_bytes]
                in_flight.append((self._broadcast_group.broadcast(frame, 0), slot))
        for work, _ in in_flight:
            work.wait(TIMEOUT)

    def _gather(
        self, stage: int, param: str, shards: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a parameter's shards of all tensor ranks, or a single one if they are equal."""
        first, last = (self._shard_of[stage * TENSOR + rank][param] for rank in (0, TENSOR - 1))
        shard = shards[param] if stage == self._stage else torch.empty(first.shape)
        if self._baseline == "verl":
            self._pipeline_group.broadcast(shard, stage).wait(TIMEOUT)
        if first.blocks == last.blocks:
            return [shard]
        tensor_shards = [torch.empty_like(shard) for _ in range(TENSOR)]
        self._tensor_group.allgather(tensor_shards, shard).wait(TIMEOUT)
        return tensor_shards

    def _assemble(
        self,
        stage: int,
        param: str,
        tensor_shards: Sequence[torch.Tensor],
        bucket: BaselineBucket,
        slot: torch.Tensor,
    ) -> None:
        full_tensors = {tensor.name: tensor.view(slot) for tensor in bucket.tensors}
        for rank, tensor_shard in enumerate(tensor_shards):
            for block in self._shard_of[stage * TENSOR + rank][param].blocks:
                target = full_tensors[block.hf_name][block.hf_rect.slices]
                target.copy_(tensor_shard[block.local_rect.slices].reshape(target.shape))


class BaselineReceiver:
    """Receives all buckets on the rollout rank with index `rollout_rank`."""

    def __init__(
        self,
        rollout_rank: int,
        buckets: Sequence[BaselineBucket],
        store: Store,
        key: str,
        num_rollout_ranks: int,
    ) -> None:
        self._buckets = buckets
        self._groups = {
            root: _group(
                store,
                f"{key}/out{root}",
                [root, *_rollout_names(num_rollout_ranks)],
                f"rollout {rollout_rank}",
            )
            for root in sorted({bucket.root for bucket in buckets})
        }
        self.received_bytes = sum(bucket.num_bytes for bucket in buckets)

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the named tensors of each bucket, in new memory, because the loader keeps views."""
        in_flight = deque(self._start(bucket) for bucket in self._buckets[:2])
        for number, bucket in enumerate(self._buckets):
            work, frame = in_flight.popleft()
            work.wait(TIMEOUT)
            yield [(tensor.name, tensor.view(frame)) for tensor in bucket.tensors]
            del frame
            if number + 2 < len(self._buckets):
                in_flight.append(self._start(self._buckets[number + 2]))

    def _start(self, bucket: BaselineBucket) -> tuple[Any, torch.Tensor]:
        frame = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        return self._groups[bucket.root].broadcast(frame, 0), frame


def _rollout_names(count: int) -> list[str]:
    return [f"rollout {number}" for number in range(count)]

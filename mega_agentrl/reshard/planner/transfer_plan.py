"""The plan of a weight update: which bytes go from which rank to which, and in what order.

Ranks are numbered across both sides, trainer ranks first, then rollout ranks. A bucket is what
one message carries: slices that the same trainer ranks hold and the same rollout ranks need. Its
hops are in causal order: the sender of a hop either holds the bucket from the start (a trainer
rank) or has received it in an earlier hop (a rollout rank that forwards it).

All ranks execute their hops in the order (bucket, hop). The earliest unfinished hop then never
waits for another one, so no cycle of waiting ranks can form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Rect, ShardLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that weights may be sent in."""


class TensorSlice(NamedTuple):
    """A rectangle of a Hugging Face tensor."""

    hf_name: str
    """Name of the tensor."""
    rect: Rect
    """Rectangle in the full tensor."""
    num_bytes: int
    """Size in the dtype in which the tensor is sent."""


class Hop(NamedTuple):
    """Transfer of a bucket from one rank to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slices that are sent together."""

    index: int
    """Position in the plan."""
    num_bytes: int
    """Payload bytes, without header and alignment."""
    slices: tuple[TensorSlice, ...]
    hops: tuple[Hop, ...]
    """Transfers of the bucket, in causal order."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The plan of a weight update, the same on all ranks."""

    num_trainer_ranks: int
    num_rollout_ranks: int
    dtype_of: dict[str, str]
    """Dtype in which a tensor is sent, by Hugging Face name."""
    buckets: tuple[Bucket, ...]
    """Buckets in the order of execution."""
    min_network_bytes: int = 0
    """Lower bound on the bytes between machines for any plan, counted from the regions."""

    @property
    def world_size(self) -> int:
        """Number of ranks on both sides."""
        return self.num_trainer_ranks + self.num_rollout_ranks

    @property
    def rollout_ranks(self) -> range:
        """Ranks that receive weights."""
        return range(self.num_trainer_ranks, self.world_size)

    def hops_of(self, rank: int) -> Iterator[tuple[Bucket, Hop]]:
        """Yield everything that one rank sends or receives, in execution order."""
        for bucket in self.buckets:
            for hop in bucket.hops:
                if rank in hop:
                    yield bucket, hop

    def split(
        self, groups: Sequence[Collection[int]], names_of: Sequence[Collection[str]]
    ) -> list[Self]:
        """Return the part of the plan that each group of ranks takes part in.

        Buckets keep their numbers and hops. Other buckets are left out, so that a large plan need
        not be sent to every rank in full.

        Args:
            groups: Ranks by group.
            names_of: Names of the tensors that the ranks of a group hold, by group.
        """
        groups_of: dict[int, list[int]] = defaultdict(list)
        for number, ranks in enumerate(groups):
            for rank in ranks:
                groups_of[rank].append(number)
        buckets: list[list[Bucket]] = [[] for _ in groups]
        numbers_of: dict[int, set[int]] = {}  # buckets share their hops
        for bucket in self.buckets:
            numbers = numbers_of.get(id(bucket.hops))
            if numbers is None:
                ranks = {rank for hop in bucket.hops for rank in hop}
                numbers = {number for rank in ranks for number in groups_of.get(rank, ())}
                numbers_of[id(bucket.hops)] = numbers
            for number in numbers:
                buckets[number].append(bucket)
        return [
            replace(
                self,
                dtype_of={name: self.dtype_of[name] for name in self.dtype_of.keys() & names},
                buckets=tuple(group_buckets),
            )
            for group_buckets, names in zip(buckets, names_of, strict=True)
        ]


class ParamSlice(NamedTuple):
    """A rectangle of a parameter of one rank."""

    param: str
    """Name of the parameter."""
    rect: Rect
    """Rectangle in the rank's shard."""


class ParamSliceIndex:
    """Finds slices of Hugging Face tensors in the shards of one rank."""

    def __init__(self, layout: Iterable[ShardLayout]) -> None:
        self._blocks: dict[str, list[tuple[Rect, str, Rect]]] = defaultdict(list)
        for shard in layout:
            for block in shard.blocks:
                self._blocks[block.hf_name].append((block.hf_rect, shard.name, block.local_rect))

    def find(self, tensor_slice: TensorSlice) -> list[ParamSlice]:
        """Return every location of a slice: one on a trainer rank, one or more on a rollout rank.

        Raises:
            ValueError: If this rank does not hold the slice.
        """
        param_slices = []
        for hf_rect, param, local_rect in self._blocks.get(tensor_slice.hf_name, ()):
            if hf_rect.contains(tensor_slice.rect):
                param_slices.append(
                    ParamSlice(param, map_rect(tensor_slice.rect, hf_rect, local_rect))
                )
        if not param_slices:
            raise _not_held_error(tensor_slice)
        return param_slices

    def check_held(self, tensor_slice: TensorSlice) -> None:
        """Raise the same error as `find`, in less time."""
        blocks = self._blocks.get(tensor_slice.hf_name, ())
        if not any(hf_rect.contains(tensor_slice.rect) for hf_rect, _, _ in blocks):
            raise _not_held_error(tensor_slice)


def _not_held_error(tensor_slice: TensorSlice) -> ValueError:
    name = f"blocks of this rank with {tensor_slice.hf_name} {tensor_slice.rect}"
    return InputError(name, 0, "1", "the plan was made from other layouts")


def map_rect(rect: Rect, hf_rect: Rect, local_rect: Rect) -> Rect:
    """Map `rect`, a part of `hf_rect`, to its position in `local_rect`.

    The two outer rectangles have equal shapes except for dims of size one, and may be swapped.
    """
    dims = [dim for dim, extent in enumerate(hf_rect.shape) if extent > 1]
    start, stop = list(local_rect.start), list(local_rect.stop)
    local_dims = (dim for dim, extent in enumerate(local_rect.shape) if extent > 1)
    for dim, local_dim in zip(dims, local_dims, strict=True):
        shift = local_rect.start[local_dim] - hf_rect.start[dim]
        start[local_dim], stop[local_dim] = rect.start[dim] + shift, rect.stop[dim] + shift
    return Rect(tuple(start), tuple(stop))

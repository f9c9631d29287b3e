"""Computes the sizes of Megatron's flat parameter buffers and each replica's share of them.

Each model chunk of a rank has one buffer for dense parameters and one for expert parameters, both
in reverse parameter order. With the distributed optimizer

    every parameter starts at a multiple of 64 elements; every bucket ends at a multiple of
    lcm(replicas, 128), and a shared embedding has its own bucket; replica r of n steps the r-th of
    n equal parts of each bucket;

and weights and gradients both live in such buffers. Without it there is no padding, weights are
separate tensors, and every replica steps all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.sections.policy import ParallelConfig
    from mega_agentrl.estimate.memory.rank_parameters import RankParameter

_PARAMETER_MULTIPLE = 64
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One flat buffer of a rank."""

    is_expert: bool
    """Whether the buffer holds expert parameters."""
    numel: int
    """Number of elements, padding included."""
    owned_by_replica: tuple[int, ...]
    """Number of parameter elements that each replica steps, without padding."""


def flat_buffers(parameters: Sequence[RankParameter], layout: ParallelConfig) -> list[FlatBuffer]:
    """Return the non-empty buffers of one rank: by chunk, dense before experts."""
    stage_ranks = layout.tensor * layout.context * layout.data
    found = []
    for _, group in groupby(parameters, key=lambda parameter: parameter.chunk):
        chunk = list(group)
        for expert in (False, True):
            num_replicas = layout.data * layout.context
            if expert:
                num_replicas = stage_ranks // (layout.expert * layout.expert_tensor_size)
            chosen = [parameter for parameter in chunk if parameter.is_expert is expert]
            if chosen:
                numel, owned = _buffer_layout(
                    chosen, num_replicas, padded=layout.distributed_optimizer
                )
                found.append(FlatBuffer(expert, numel, owned))
    return found


def _buffer_layout(
    parameters: Sequence[RankParameter], num_replicas: int, *, padded: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the number of elements of the buffer and the number that each replica steps."""
    if not padded:
        numel = sum(parameter.numel for parameter in parameters)
        return numel, (numel,) * num_replicas
    multiple = lcm(num_replicas, _BUCKET_MULTIPLE)
    owned = [0] * num_replicas
    end = 0
    for bucket in _buckets(parameters):
        spans, stop = [], 0
        for parameter in bucket:
            start = _round_up(stop, _PARAMETER_MULTIPLE)
            stop = start + parameter.numel
            spans.append((start, stop))
        size = _round_up(stop, multiple)
        for replica, count in _replica_shares(spans, size // num_replicas):
            owned[replica] += count
        end += size
    return end, tuple(owned)


def _buckets(parameters: Sequence[RankParameter]) -> Iterator[list[RankParameter]]:
    """Yield the parameters of each bucket in reverse order; a shared embedding is separate."""
    for _, run in groupby(
        reversed(parameters), key=lambda parameter: parameter.is_shared_embedding
    ):
        yield list(run)


def _replica_shares(spans: Sequence[tuple[int, int]], share: int) -> Iterator[tuple[int, int]]:
    """Yield (replica, number of its elements) for every replica that a span touches."""
    for start, stop in spans:
        while start < stop:
            replica = start // share
            border = min(stop, (replica + 1) * share)
            yield replica, border - start
            start = border


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""Megatron's flat buffers: how parameters lie in them, and which elements a replica steps.

Each chunk of a rank has one buffer for the dense parameters and one for those of experts, in
which parameters lie last to first. With the distributed optimizer

    every parameter starts at a multiple of 64 elements,
    every bucket ends at a multiple of lcm(replicas, 128); a shared embedding is a bucket,
    replica r of n steps the r-th n-th of each bucket,

and weights and gradients both lie in such a buffer. Without it there is no padding, weights lie
apart and every replica steps everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import ParallelConfig
    from mega_agentrl.estimate.rank_parameters import Parameter

_PARAMETER_MULTIPLE = 64
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """expert: of experts. numel: elements, padding included. owned: elements of parameters by
    replica.
    """

    expert: bool
    numel: int
    owned: tuple[int, ...]


def flat_buffers(parameters: Sequence[Parameter], layout: ParallelConfig) -> list[FlatBuffer]:
    """The buffers of one rank: by chunk, dense before experts, empty ones left out."""
    stage_ranks = layout.tensor * layout.context * layout.data
    found = []
    for _, group in groupby(parameters, key=lambda parameter: parameter.chunk):
        chunk = list(group)
        for expert in (False, True):
            num_replicas = layout.data * layout.context
            if expert:
                num_replicas = stage_ranks // (layout.expert * layout.expert_tensor_size)
            chosen = [parameter for parameter in chunk if parameter.expert is expert]
            if chosen:
                numel, owned = _lay_out(chosen, num_replicas, padded=layout.distributed_optimizer)
                found.append(FlatBuffer(expert, numel, owned))
    return found


def _lay_out(
    parameters: Sequence[Parameter], num_replicas: int, *, padded: bool
) -> tuple[int, tuple[int, ...]]:
    """Elements of the buffer, and those that each replica steps."""
    if not padded:
        numel = sum(parameter.numel for parameter in parameters)
        return numel, (numel,) * num_replicas
    multiple = lcm(num_replicas, _BUCKET_MULTIPLE)
    owned = [0] * num_replicas
    end = 0
    for bucket in _buckets(parameters):
        spans, stop = [], 0
        for parameter in bucket:
            start = _up(stop, _PARAMETER_MULTIPLE)
            stop = start + parameter.numel
            spans.append((start, stop))
        size = _up(stop, multiple)
        for replica, count in _shares(spans, size // num_replicas):
            owned[replica] += count
        end += size
    return end, tuple(owned)


def _buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Runs of parameters, last first; a shared embedding is a run by itself."""
    for _, run in groupby(reversed(parameters), key=lambda parameter: parameter.shared):
        yield list(run)


def _shares(spans: Sequence[tuple[int, int]], share: int) -> Iterator[tuple[int, int]]:
    """(replica, elements of a span that are its), for every replica that a span touches."""
    for start, stop in spans:
        while start < stop:
            replica = start // share
            border = min(stop, (replica + 1) * share)
            yield replica, border - start
            start = border


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

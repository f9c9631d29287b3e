"""Causal attention inside packed rows as a list of segments, and their two computing plans.

A segment is a run of one rank's queries and the keys it may see: the first num_keys of its row,
the last of which is that of the segment's last query. So query q of a segment sees its keys
0 .. num_keys - num_queries + q. Without context ranks a segment is a row; with C of them each
row gives two (see `context`).

    padded  segments of similar size side by side in rectangular blocks, for kernels that take
            a batch; blocks are made so that padding costs less than half of the work itself
    ragged  segments end to end with their boundaries, for kernels that take lengths

Both gather keys by index, because with context ranks they lie elsewhere, and some in two
segments. Built once per micro-batch and used by every layer.

Suffixes: S queries of this rank, W keys as they were gathered, P query slots and K key slots of
a plan, N segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.context import gathered_places, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

# Scores that a kernel computes in about the time that starting one takes.
_FREE_SCORES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """query_start: in this rank's tokens; key_start: in the whole packing."""

    query_start: int
    num_queries: int
    key_start: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """num_segments x num_queries query slots against num_segments x num_keys key slots.

    mask: [num_segments, 1, num_queries, num_keys] bool, who sees whom; None for the square
    lower triangle.
    """

    num_segments: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedPlan:
    """query_P, key_K: which token each slot holds, block after block (padding repeats a
    segment's last token). slot_S: the query slot of each token.
    """

    blocks: tuple[Block, ...]
    query_P: torch.Tensor
    key_K: torch.Tensor
    slot_S: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """query_start_N, key_start_N: [N + 1] int32 first slot of each segment, and the number.

    Query slots are the rank's tokens in order. key_K: key of each slot; None: likewise in order.
    """

    query_start_N: torch.Tensor
    key_start_N: torch.Tensor
    max_queries: int
    max_keys: int
    key_K: torch.Tensor | None


def cut(start_R: Sequence[int], rank: int, size: int) -> list[Segment]:
    """Segments of a context rank, in the order of its tokens."""
    found: list[Segment] = []
    local = 0
    for start, stop in pairwise(start_R):
        for first, last in spans(stop - start, rank, size):
            found.append(
                Segment(query_start=local, num_queries=last - first, key_start=start, num_keys=last)
            )
            local += last - first
    return found


def padded_plan(start_R: Sequence[int], rank: int, size: int, device: torch.device) -> PaddedPlan:
    """The plan in rectangular blocks."""
    segments = cut(start_R, rank, size)
    groups = similar(segments)
    place_W = gathered_places(start_R, size)
    slot_S = torch.empty(sum(part.num_queries for part in segments), dtype=torch.int64)
    queries, keys, blocks, used = [], [], [], 0
    for group in groups:
        query_NP, real_NP = _slots([(part.query_start, part.num_queries) for part in group])
        key_NK, _ = _slots([(part.key_start, part.num_keys) for part in group])
        slot_S[query_NP[real_NP]] = used + torch.nonzero(real_NP.flatten()).flatten()
        used += query_NP.numel()
        queries.append(query_NP.flatten())
        keys.append(place_W[key_NK.flatten()])
        blocks.append(_block(group, device))
    return PaddedPlan(
        blocks=tuple(blocks),
        query_P=torch.cat(queries).to(device),
        key_K=torch.cat(keys).to(device),
        slot_S=slot_S.to(device),
    )


def ragged_plan(start_R: Sequence[int], rank: int, size: int, device: torch.device) -> RaggedPlan:
    """The plan by boundaries."""
    segments = cut(start_R, rank, size)
    key_K = None
    if size > 1:
        parts = [torch.arange(part.key_start, part.key_start + part.num_keys) for part in segments]
        key_K = gathered_places(start_R, size)[torch.cat(parts)].to(device)
    return RaggedPlan(
        query_start_N=boundaries([part.num_queries for part in segments], device),
        key_start_N=boundaries([part.num_keys for part in segments], device),
        max_queries=max(part.num_queries for part in segments),
        max_keys=max(part.num_keys for part in segments),
        key_K=key_K,
    )


def boundaries(count_N: Sequence[int], device: torch.device) -> torch.Tensor:
    """[N + 1] int32: 0 and the running sums of N counts."""
    sums = torch.tensor([0, *count_N], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sums.to(device)


def similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in groups, largest first, in which padding costs at most half of the work."""
    groups: list[list[Segment]] = []
    work = wide = 0
    for part in sorted(segments, key=lambda part: (-part.num_keys, -part.num_queries)):
        wide = max(wide, part.num_queries)
        work += part.num_queries * part.num_keys
        if groups:
            area = (len(groups[-1]) + 1) * wide * groups[-1][0].num_keys
            if area - work <= max(work // 2, _FREE_SCORES):
                groups[-1].append(part)
                continue
        groups.append([part])
        wide, work = part.num_queries, part.num_queries * part.num_keys
    return groups


def _slots(runs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, longest] tokens of runs of (start, count), last one repeated; and which are real."""
    start_N, count_N = torch.tensor(runs).unbind(1)
    step = torch.arange(int(count_N.max()))
    token_NL = start_N[:, None] + torch.minimum(step[None], count_N[:, None] - 1)
    return token_NL, step[None] < count_N[:, None]


def _block(group: Sequence[Segment], device: torch.device) -> Block:
    num_queries = max(part.num_queries for part in group)
    num_keys = max(part.num_keys for part in group)
    ahead_N = torch.tensor([part.num_keys - part.num_queries for part in group])
    mask = None
    if ahead_N.any():
        last = ahead_N[:, None] + torch.arange(num_queries)
        mask = (torch.arange(num_keys) <= last[:, :, None])[:, None].to(device)
    return Block(num_segments=len(group), num_queries=num_queries, num_keys=num_keys, mask=mask)

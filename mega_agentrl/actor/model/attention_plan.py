"""Plans for causal attention inside packed rows.

A segment is a run of consecutive queries of one rank with the keys they may attend to: the
first `num_keys` tokens of the row, ending with the segment's last query. Query q of a segment
attends to its keys 0 .. num_keys - num_queries + q. Without context parallelism a segment is a
row; with it, every row gives each rank two segments (see `parallel.context_parallel`).

Two plans compute the same attention:

    padded  segments of similar size stacked into rectangular blocks, for batched kernels
    varlen  segments end to end with cumulative lengths, for variable-length kernels

Both gather keys by index, because under context parallelism the keys come from all ranks and
some belong to two segments. A plan is built once per micro-batch and used by every layer.

Shape suffixes: S queries of this rank, W gathered keys, P query slots and K key slots of a
plan, N segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.parallel.context_parallel import gathered_token_indices, rank_token_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

# Number of attention scores that take about as long as one kernel launch.
_KERNEL_LAUNCH_COST_SCORES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSegment:
    """A run of queries of one row and the keys they attend to."""

    query_start: int
    """First query, in this rank's tokens."""
    num_queries: int
    key_start: int
    """First key, in the packed tokens of all context ranks."""
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBlock:
    """Segments padded to a common number of queries and of keys."""

    num_segments: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None
    """`[num_segments, 1, num_queries, num_keys]` bool; None for the square lower triangle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAttentionPlan:
    """Attention in rectangular blocks; padding repeats the last token of a segment."""

    blocks: tuple[SegmentBlock, ...]
    query_index_P: torch.Tensor
    """`[P]` query of each query slot, block after block."""
    key_index_K: torch.Tensor
    """`[K]` gathered key of each key slot, block after block."""
    slot_index_S: torch.Tensor
    """`[S]` query slot of each query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenAttentionPlan:
    """Attention by cumulative segment lengths; queries are this rank's tokens in order."""

    cu_seqlens_q: torch.Tensor
    """`[N + 1]` int32, first query of each segment and the number of queries."""
    cu_seqlens_k: torch.Tensor
    """`[N + 1]` int32, first key slot of each segment and the number of key slots."""
    max_seqlen_q: int
    max_seqlen_k: int
    key_index_K: torch.Tensor | None
    """`[K]` gathered key of each key slot; None if they are in order."""


def split_into_segments(start_R: Sequence[int], rank: int, size: int) -> list[AttentionSegment]:
    """Return the segments of a context-parallel rank, in the order of its tokens."""
    segments: list[AttentionSegment] = []
    query_start = 0
    for start, stop in pairwise(start_R):
        for first, last in rank_token_spans(stop - start, rank, size):
            segments.append(
                AttentionSegment(
                    query_start=query_start,
                    num_queries=last - first,
                    key_start=start,
                    num_keys=last,
                )
            )
            query_start += last - first
    return segments


def make_padded_plan(
    start_R: Sequence[int], rank: int, size: int, device: torch.device
) -> PaddedAttentionPlan:
    """Build the padded plan of a context-parallel rank."""
    segments = split_into_segments(start_R, rank, size)
    groups = group_by_size(segments)
    gathered_W = gathered_token_indices(start_R, size)
    slot_S = torch.empty(sum(part.num_queries for part in segments), dtype=torch.int64)
    queries, keys, blocks, num_slots = [], [], [], 0
    for group in groups:
        query_NP, real_NP = _slot_tokens([(part.query_start, part.num_queries) for part in group])
        key_NK, _ = _slot_tokens([(part.key_start, part.num_keys) for part in group])
        slot_S[query_NP[real_NP]] = num_slots + torch.nonzero(real_NP.flatten()).flatten()
        num_slots += query_NP.numel()
        queries.append(query_NP.flatten())
        keys.append(gathered_W[key_NK.flatten()])
        blocks.append(_make_block(group, device))
    return PaddedAttentionPlan(
        blocks=tuple(blocks),
        query_index_P=torch.cat(queries).to(device),
        key_index_K=torch.cat(keys).to(device),
        slot_index_S=slot_S.to(device),
    )


def make_varlen_plan(
    start_R: Sequence[int], rank: int, size: int, device: torch.device
) -> VarlenAttentionPlan:
    """Build the varlen plan of a context-parallel rank."""
    segments = split_into_segments(start_R, rank, size)
    key_K = None
    if size > 1:
        parts = [torch.arange(part.key_start, part.key_start + part.num_keys) for part in segments]
        key_K = gathered_token_indices(start_R, size)[torch.cat(parts)].to(device)
    return VarlenAttentionPlan(
        cu_seqlens_q=cumulative_lengths([part.num_queries for part in segments], device),
        cu_seqlens_k=cumulative_lengths([part.num_keys for part in segments], device),
        max_seqlen_q=max(part.num_queries for part in segments),
        max_seqlen_k=max(part.num_keys for part in segments),
        key_index_K=key_K,
    )


def cumulative_lengths(count_N: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `[N + 1]` int32: 0 and the running sums of N counts."""
    sums = torch.tensor([0, *count_N], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sums.to(device)


def group_by_size(segments: Sequence[AttentionSegment]) -> list[list[AttentionSegment]]:
    """Group segments, largest first, so that padding is at most half of the real scores.

    Padding up to the cost of a kernel launch is allowed, too.
    """
    groups: list[list[AttentionSegment]] = []
    num_scores = max_queries = 0
    for part in sorted(segments, key=lambda part: (-part.num_keys, -part.num_queries)):
        max_queries = max(max_queries, part.num_queries)
        num_scores += part.num_queries * part.num_keys
        if groups:
            num_padded = (len(groups[-1]) + 1) * max_queries * groups[-1][0].num_keys
            if num_padded - num_scores <= max(num_scores // 2, _KERNEL_LAUNCH_COST_SCORES):
                groups[-1].append(part)
                continue
        groups.append([part])
        max_queries, num_scores = part.num_queries, part.num_queries * part.num_keys
    return groups


def _slot_tokens(runs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[N, longest]` tokens of (start, count) runs, padded, and a mask of the real ones."""
    start_N, count_N = torch.tensor(runs).unbind(1)
    step = torch.arange(int(count_N.max()))
    token_NL = start_N[:, None] + torch.minimum(step[None], count_N[:, None] - 1)
    return token_NL, step[None] < count_N[:, None]


def _make_block(group: Sequence[AttentionSegment], device: torch.device) -> SegmentBlock:
    num_queries = max(part.num_queries for part in group)
    num_keys = max(part.num_keys for part in group)
    ahead_N = torch.tensor([part.num_keys - part.num_queries for part in group])
    mask = None
    if ahead_N.any():
        last = ahead_N[:, None] + torch.arange(num_queries)
        mask = (torch.arange(num_keys) <= last[:, :, None])[:, None].to(device)
    return SegmentBlock(
        num_segments=len(group), num_queries=num_queries, num_keys=num_keys, mask=mask
    )

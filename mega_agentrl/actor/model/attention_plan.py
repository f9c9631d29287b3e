"""Plans for causal attention inside packed trees.

A micro-batch holds trees in depth-first order (`actor.training.packing`). A branch is a run of
packed tokens that follows one path of a tree. The keys of a token are the tokens on the path from
the root of its tree to the token itself, which is a list of runs of packed tokens. A segment is a
run of consecutive queries of one branch on one rank, with their keys in the order of the path,
ending with the segment's last query: query q of a segment attends to the segment's keys
0 .. num_keys - num_queries + q. Where rows share nothing, every branch is a row, and has one
segment, or two with context parallelism.

Three plans compute the same attention:

    padded        segments of similar size stacked into rectangular blocks, for batched kernels
    varlen        segments end to end with cumulative lengths, for variable-length kernels
    block-sparse  no segments, but the blocks of the whole mask that are not empty, for the kernels
                  of `tree_attention`

The first two gather keys by index, because a key belongs to the segments of all branches below it,
and under context parallelism the keys come from all ranks. The third one reads keys where they are:
in depth-first order the tokens that attend to a key are consecutive. A plan is built once per
micro-batch and used by every layer.

Shape suffixes: S queries of this rank, W packed tokens of all context ranks, P query slots and K
key slots of a plan, N segments, Q queries of a padded block, G trees, L listed blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mega_agentrl.actor.device import from_host
from mega_agentrl.actor.parallel.context_parallel import (
    gathered_token_indices,
    rank_token_indices,
    rank_token_spans,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Number of attention scores that take about as long as one more block, on a CPU.
_BLOCK_COST_SCORES = 32_768
# A block has at most one score of padding for this many real scores.
_SCORES_PER_PADDING = 8
BLOCK_TOKENS = 64
"""Queries and keys of a block of the kernels of `tree_attention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A run of packed tokens that follows one path of a tree."""

    start: int
    """First packed token."""
    stop: int
    """One past the last packed token; the next branch begins there."""
    path: tuple[tuple[int, int], ...]
    """Runs (start, stop) of packed tokens from the root of the tree up to the branch, without the
    branch's own tokens; empty for the first branch of a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSegment:
    """A run of queries of one branch and the keys they attend to."""

    query_start: int
    """First query, in this rank's tokens."""
    num_queries: int
    key_runs: tuple[tuple[int, int], ...]
    """Runs (start, stop) of packed tokens, in the order of the path."""

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return sum(stop - start for start, stop in self.key_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBlock:
    """Segments padded to a common number of queries and of keys."""

    num_segments: int
    num_queries: int
    num_keys: int
    num_earlier_N: torch.Tensor | None
    """Number of keys of each segment that come before its first query: `[num_segments]`, or `[1]`
    if all have equally many; None if there are none."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the bias of the scores: 0, or -inf at keys that a query does not attend to.

        The result is `[num_segments, 1, num_queries, num_keys]`, or None if query i attends to
        keys 0 .. i in all segments.
        """
        if self.num_earlier_N is None:
            return None
        device = self.num_earlier_N.device
        last_key_NQ = self.num_earlier_N[:, None] + torch.arange(self.num_queries, device=device)
        is_masked_NQK = torch.arange(self.num_keys, device=device) > last_key_NQ[:, :, None]
        bias_NQK = torch.zeros(is_masked_NQK.shape, dtype=dtype, device=device)
        bias_NQK.masked_fill_(is_masked_NQK, -inf)
        return bias_NQK[:, None].expand(self.num_segments, -1, -1, -1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLists:
    """For each block of queries or keys, the blocks of the other side to compute.

    Block n has the blocks `block_L[bounds[2 * n] : bounds[2 * n + 1]]`, in which some scores are
    masked, and `block_L[bounds[2 * n + 1] : bounds[2 * n + 2]]`, in which no score is.
    """

    bounds: torch.Tensor
    """`[2 * num_blocks + 1]` int32 offsets in `block_L`."""
    block_L: torch.Tensor
    """`[L]` int32 numbers of blocks of the other side, ascending in each list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttentionPlan:
    """Attention by packed indices: token i attends to token j if and only if j <= i < end_j."""

    num_queries: int
    num_keys: int
    token_S: torch.Tensor
    """`[S]` int32 packed index of each query, ascending, padded with -1 to whole blocks."""
    end_W: torch.Tensor
    """`[W]` int32 result of `subtree_ends`, padded with 0 to whole blocks."""
    keys_of_queries: BlockLists
    """Key blocks for each block of queries."""
    queries_of_keys: BlockLists
    """Query blocks for each block of keys."""
    key_index_W: torch.Tensor | None
    """`[W]` gathered key of each packed token; None if they are in order."""


def split_into_segments(
    start_G: Sequence[int], branches: Sequence[Branch], rank: int, size: int
) -> list[AttentionSegment]:
    """Return the segments of a context-parallel rank, in the order of its tokens.

    Args:
        start_G: First of the W packed tokens of each tree, followed by W.
        branches: The branches of all trees, in order.
        rank: The context rank.
        size: Number of context ranks.
    """
    segments: list[AttentionSegment] = []
    query_start, remaining = 0, iter(branches)
    branch = next(remaining)
    for start, stop in pairwise(start_G):
        for first, last in rank_token_spans(stop - start, rank, size):
            position, last = start + first, start + last
            while position < last:
                while branch.stop <= position:
                    branch = next(remaining)
                end = min(branch.stop, last)
                segments.append(
                    AttentionSegment(
                        query_start=query_start,
                        num_queries=end - position,
                        key_runs=(*branch.path, (branch.start, end)),
                    )
                )
                query_start += end - position
                position = end
    return segments


def make_padded_plan(
    start_G: Sequence[int],
    branches: Sequence[Branch],
    rank: int,
    size: int,
    device: torch.device,
) -> PaddedAttentionPlan:
    """Build the padded plan of a context-parallel rank."""
    segments = split_into_segments(start_G, branches, rank, size)
    gathered_W = gathered_token_indices(start_G, size)
    slot_S = torch.empty(sum(segment.num_queries for segment in segments), dtype=torch.int64)
    queries, keys, blocks, num_slots = [], [], [], 0
    for group in group_by_size(segments):
        query_NP, real_NP = _pad_to_longest(
            [torch.arange(segment.num_queries) + segment.query_start for segment in group]
        )
        key_NK, _ = _pad_to_longest([_key_tokens(segment) for segment in group])
        slot_S[query_NP[real_NP]] = num_slots + torch.nonzero(real_NP.flatten()).flatten()
        num_slots += query_NP.numel()
        queries.append(query_NP.flatten())
        keys.append(gathered_W[key_NK.flatten()])
        blocks.append(_make_block(group, device))
    return PaddedAttentionPlan(
        blocks=tuple(blocks),
        query_index_P=from_host(torch.cat(queries), device),
        key_index_K=from_host(torch.cat(keys), device),
        slot_index_S=from_host(slot_S, device),
    )


def make_varlen_plan(
    start_G: Sequence[int],
    branches: Sequence[Branch],
    rank: int,
    size: int,
    device: torch.device,
) -> VarlenAttentionPlan:
    """Build the varlen plan of a context-parallel rank."""
    segments = split_into_segments(start_G, branches, rank, size)
    key_K = None
    if size > 1 or any(branch.path for branch in branches):
        tokens_K = torch.cat([_key_tokens(segment) for segment in segments])
        key_K = from_host(gathered_token_indices(start_G, size)[tokens_K], device)
    return VarlenAttentionPlan(
        cu_seqlens_q=cumulative_lengths([segment.num_queries for segment in segments], device),
        cu_seqlens_k=cumulative_lengths([segment.num_keys for segment in segments], device),
        max_seqlen_q=max(segment.num_queries for segment in segments),
        max_seqlen_k=max(segment.num_keys for segment in segments),
        key_index_K=key_K,
    )


def make_block_sparse_plan(
    start_G: Sequence[int],
    branches: Sequence[Branch],
    rank: int,
    size: int,
    device: torch.device,
) -> BlockSparseAttentionPlan:
    """Build the block-sparse plan of a context-parallel rank."""
    token_S, end_W = rank_token_indices(start_G, rank, size), subtree_ends(branches)
    num_queries, num_keys = len(token_S), len(end_W)
    token_S = functional.pad(token_S, (0, -num_queries % BLOCK_TOKENS), value=-1)
    end_W = functional.pad(end_W, (0, -num_keys % BLOCK_TOKENS), value=0)
    may_be_visible, is_full = _visible_blocks(token_S, end_W)
    return BlockSparseAttentionPlan(
        num_queries=num_queries,
        num_keys=num_keys,
        token_S=from_host(token_S.int(), device),
        end_W=from_host(end_W.int(), device),
        keys_of_queries=_list_blocks(may_be_visible, is_full, device),
        queries_of_keys=_list_blocks(may_be_visible.T, is_full.T, device),
        key_index_W=from_host(gathered_token_indices(start_G, size), device) if size > 1 else None,
    )


def subtree_ends(branches: Sequence[Branch]) -> torch.Tensor:
    """Return `[W]` int64, for each packed token one past the last token that attends to it.

    In depth-first order the tokens that have a given token on their paths are consecutive.
    """
    end_W = torch.empty(branches[-1].stop, dtype=torch.int64)
    for branch in branches:
        for start, stop in (*branch.path, (branch.start, branch.stop)):
            end_W[start:stop] = branch.stop
    return end_W


def _visible_blocks(
    token_S: torch.Tensor, end_W: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[query blocks, key blocks]` bool: if a score may be visible, and if all are."""
    query_NQ, end_NK = token_S.view(-1, BLOCK_TOKENS), end_W.view(-1, BLOCK_TOKENS)
    first_key = torch.arange(0, len(end_W), BLOCK_TOKENS)
    # Padding has the lowest index, -1: a padded block is never visible as a whole.
    first_query = query_NQ[:, :1]
    lowest_query, highest_query = query_NQ.aminmax(dim=1, keepdim=True)
    lowest_end, highest_end = end_NK.aminmax(dim=1)
    may_be_visible = (first_key <= highest_query) & (first_query < highest_end)
    is_full = (first_key + BLOCK_TOKENS <= lowest_query + 1) & (highest_query < lowest_end)
    return may_be_visible, is_full


def _list_blocks(
    may_be_visible: torch.Tensor, is_full: torch.Tensor, device: torch.device
) -> BlockLists:
    """List the blocks of each row of the matrices, those that are masked in part first."""
    is_listed = torch.stack([may_be_visible & ~is_full, is_full], dim=1)
    return BlockLists(
        bounds=cumulative_lengths(is_listed.sum(dim=-1).flatten().tolist(), device),
        block_L=from_host(is_listed.nonzero()[:, 2].int(), device),
    )


def cumulative_lengths(count_N: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `[N + 1]` int32: 0 and the running sums of N counts."""
    sums = torch.tensor([0, *count_N], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return from_host(sums, device)


def group_by_size(segments: Sequence[AttentionSegment]) -> list[list[AttentionSegment]]:
    """Group segments, largest first, so that padding is at most an eighth of the real scores.

    Padding up to the cost of one more block is allowed, too.
    """
    groups: list[list[AttentionSegment]] = []
    num_scores = max_queries = 0
    for segment in sorted(segments, key=lambda segment: (-segment.num_keys, -segment.num_queries)):
        max_queries = max(max_queries, segment.num_queries)
        num_scores += segment.num_queries * segment.num_keys
        if groups:
            num_padded = (len(groups[-1]) + 1) * max_queries * groups[-1][0].num_keys
            if num_padded - num_scores <= max(
                num_scores // _SCORES_PER_PADDING, _BLOCK_COST_SCORES
            ):
                groups[-1].append(segment)
                continue
        groups.append([segment])
        max_queries, num_scores = segment.num_queries, segment.num_queries * segment.num_keys
    return groups


def _key_tokens(segment: AttentionSegment) -> torch.Tensor:
    """Return the packed tokens of the segment's keys."""
    return torch.cat([torch.arange(start, stop) for start, stop in segment.key_runs])


def _pad_to_longest(tokens: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[N, longest]` lists, padded with their last token, and a mask of the real tokens."""
    count_N = torch.tensor([len(token_list) for token_list in tokens])
    step = torch.arange(int(count_N.max()))
    start_N = count_N.cumsum(0) - count_N
    flat_index = start_N[:, None] + torch.minimum(step[None], count_N[:, None] - 1)
    return torch.cat(list(tokens))[flat_index], step[None] < count_N[:, None]


def _make_block(group: Sequence[AttentionSegment], device: torch.device) -> SegmentBlock:
    num_queries = max(segment.num_queries for segment in group)
    num_keys = max(segment.num_keys for segment in group)
    num_earlier = [segment.num_keys - segment.num_queries for segment in group]
    if len(set(num_earlier)) == 1:
        num_earlier = num_earlier[:1]
    return SegmentBlock(
        num_segments=len(group),
        num_queries=num_queries,
        num_keys=num_keys,
        num_earlier_N=from_host(torch.tensor(num_earlier), device) if any(num_earlier) else None,
    )

"""Splits an update's rows into optimizer steps, data-parallel ranks and micro-batches.

The mini-batch of an optimizer step is a run of consecutive rows. It is cut between rollout trees if
there are at least as many trees as steps. The rows of a tree are computed together, so that the
tokens that they share are computed once: trees are assigned to data ranks, the costliest first,
each to the rank with the least cost so far, and the trees of a rank are split the same way into
micro-batches within the token budget. A tree that is larger than the budget, or too large to
balance the ranks, is cut in depth-first order into parts, each of which computes the path to its
first row again. Every row is in one part. The loss of a token on a repeated path is therefore split
over the parts by row, and the sum over the parts is the loss of flat rows.

All data ranks get the same number of micro-batches, because the pipeline schedule and the gradient
all-reduce run in lock step. An interleaved pipeline schedule needs a multiple of the pipeline size;
the number is rounded up before the rows are assigned, so that no micro-batch is empty while another
has two trees. The plan is deterministic: ties go to the lowest index.

Lengths count the tokens of the rows' inputs in depth-first order (`RowLengths`). Shape suffixes: R
rows, K selected rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mega_agentrl.batch.tree_order import shared_between
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    import torch

    from mega_agentrl.types.batch import TrainBatch

Rows = list[int]
"""Ascending indices of rows."""
_PARTS_PER_SHARE = (None, 1, 2, 4, 8)
"""Sizes of the parts of trees to try: the whole token budget, or a rank's share of all tokens
divided by these numbers."""


@dataclass(slots=True, kw_only=True, frozen=True)
class InputLengths:
    """Number of tokens that the model reads for some rows, and the cost of computing them."""

    length_R: np.ndarray
    """[R] int64 input tokens of each row."""
    shared_length_R: np.ndarray
    """[R] int64 leading input tokens that each row shares with the row before it."""
    pairs_per_token: float = float("inf")
    """Number of attention scores that cost as much as the rest of the model for one token."""

    def take(self, rows: Sequence[int]) -> InputLengths:
        """Return the inputs of the rows at these ascending indices."""
        return InputLengths(
            length_R=self.length_R[np.array(rows, dtype=np.int64)],
            shared_length_R=shared_between(self.shared_length_R, rows),
            pairs_per_token=self.pairs_per_token,
        )

    def num_tokens(self, rows: Rows) -> int:
        """Return the number of tokens of these rows, where a token that they share counts once."""
        shared_K = shared_between(self.shared_length_R, rows)
        return int((self.length_R[rows] - shared_K).sum())

    def cost(self, rows: Rows) -> float:
        """Return the cost of computing these rows together, in tokens.

        It is the number of tokens plus the number of causal attention scores divided by
        `pairs_per_token`; what rows share counts once.
        """
        length_K, shared_K = self.length_R[rows], shared_between(self.shared_length_R, rows)
        pairs_K = _causal_pairs(length_K) - _causal_pairs(shared_K)
        return float((length_K - shared_K + pairs_K / self.pairs_per_token).sum())


def minibatch_masks(batch: TrainBatch, num_steps: int) -> Iterator[torch.Tensor]:
    """Yield one [B, T] bool mask per optimizer step: `mask_BT` restricted to that step's rows.

    Each step has about equally many consecutive rows, and there are at most as many steps as rows.
    If there are at least as many trees as steps, no tree is divided between steps, and if there are
    at least as many trajectories, no trajectory. The masks are disjoint and their union is
    `mask_BT`.
    """
    mask_BT = batch.mask_BT
    num_rows = mask_BT.shape[0]
    num_steps = max(1, min(num_steps, num_rows))
    cuts = [num_rows * step // num_steps for step in range(num_steps + 1)]
    for is_start_B in _possible_starts(batch):
        starts = [*is_start_B.nonzero().flatten().tolist(), num_rows]
        if len(starts) > num_steps:
            cuts = _nearest_starts(cuts, starts)
            break
    for start, stop in pairwise(cuts):
        step_BT = mask_BT.clone().bool()
        step_BT[:start] = False
        step_BT[stop:] = False
        yield step_BT


def plan_micro_batches(
    lengths: InputLengths, *, num_data: int, budget_tokens: int, num_multiple: int = 1
) -> list[list[Rows]]:
    """Return the row indices of each micro-batch, indexed by [data rank][micro-batch].

    Every row occurs exactly once, and the rows of a micro-batch keep their order. With fewer rows
    than micro-batches some micro-batches are empty; their passes contribute nothing.

    Args:
        lengths: inputs of the rows.
        num_data: number of data-parallel ranks.
        budget_tokens: maximum number of tokens in a micro-batch.
        num_multiple: the number of micro-batches of each rank is a multiple of this.

    Raises:
        ValueError: there are no rows, a single row exceeds the budget, or a count is below 1.
    """
    num_rows = len(lengths.length_R)
    if min(num_data, num_multiple, num_rows) < 1:
        got = {"rows": num_rows, "data ranks": num_data, "multiple": num_multiple}
        cause = "every trajectory was filtered out"
        raise InputError("micro-batches", got, "at least one of each", cause)
    longest = int(lengths.length_R.argmax())
    if lengths.length_R[longest] > budget_tokens:
        expected = (
            "at least the longest prompt plus response; row "
            f"{longest} alone has {lengths.length_R[longest]} tokens"
        )
        raise ConfigError("optim.micro_batch_tokens", budget_tokens, expected)
    ranks = [
        _cut_trees(rows, lengths, budget_tokens)
        for rows in _assign_to_ranks(lengths, num_data, budget_tokens)
    ]
    tokens = [[lengths.num_tokens(part) for part in parts] for parts in ranks]
    num_micro = -(-max(1, -(-max(map(sum, tokens)) // budget_tokens)) // num_multiple)
    num_micro *= num_multiple
    while True:
        plan = [
            _balance_into_bins(parts, counts, num_micro)
            for parts, counts in zip(ranks, tokens, strict=True)
        ]
        if all(lengths.num_tokens(micro) <= budget_tokens for micros in plan for micro in micros):
            return plan
        num_micro += num_multiple


def _possible_starts(batch: TrainBatch) -> Iterator[torch.Tensor]:
    """Yield [B] bool where trees begin, and where trajectories begin, as far as there are any."""
    is_first_B = batch.mask_BT.new_ones(batch.mask_BT.shape[0]).bool()
    if batch.trajectory_B is not None:
        is_first_B[1:] = batch.trajectory_B[1:] != batch.trajectory_B[:-1]
    if batch.shared_length_B is not None:
        yield is_first_B & (batch.shared_length_B == 0)
    if batch.trajectory_B is not None:
        yield is_first_B


def _nearest_starts(cuts: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return for each cut the nearest start, all different, so that no step is empty.

    Args:
        cuts: Ascending row numbers at which the steps would begin, and the number of rows.
        starts: Ascending row numbers at which trees or trajectories begin, and the number of rows.
    """
    tree_cuts = [0]
    for step, cut in enumerate(cuts[1:], start=1):
        first = starts.index(tree_cuts[-1]) + 1
        last = len(starts) - (len(cuts) - 1 - step)
        tree_cuts.append(min(starts[first:last], key=lambda start: (abs(start - cut), start)))
    return tree_cuts


def _assign_to_ranks(lengths: InputLengths, num_data: int, budget_tokens: int) -> list[Rows]:
    """Return the rows of each data rank, in the best of several assignments.

    The best assignment has the lowest maximum cost of a rank. The assignments differ in the size of
    the parts of trees (`_PARTS_PER_SHARE`): smaller parts balance better, but compute more shared
    tokens repeatedly.
    """
    rows = list(range(len(lengths.length_R)))
    if num_data == 1:
        return [rows]
    share = lengths.num_tokens(rows) / num_data
    plans = []
    for num_parts in _PARTS_PER_SHARE:
        size = budget_tokens if num_parts is None else min(budget_tokens, share / num_parts)
        parts = _cut_trees(rows, lengths, size)
        ranks = _balance_into_bins(parts, [lengths.cost(part) for part in parts], num_data)
        plans.append((max(lengths.cost(rank) for rank in ranks), ranks))
    return min(plans, key=lambda plan: plan[0])[1]


def _cut_trees(rows: Rows, lengths: InputLengths, max_tokens: float) -> list[Rows]:
    """Split rows into whole trees, or into consecutive parts if a tree exceeds `max_tokens`."""
    parts: list[Rows] = []
    num_tokens = 0
    for row, shared in zip(rows, shared_between(lengths.shared_length_R, rows), strict=True):
        length = int(lengths.length_R[row])
        if shared and num_tokens + length - shared <= max_tokens:
            parts[-1].append(row)
            num_tokens += length - shared
        else:
            parts.append([row])
            num_tokens = length
    return parts


def _balance_into_bins(
    parts: Sequence[Rows], weights: Sequence[float], num_bins: int
) -> list[Rows]:
    """Split parts into bins of about equal weight: heaviest first, to the lightest bin."""
    bins: list[Rows] = [[] for _ in range(num_bins)]
    load = [(0.0, 0, index) for index in range(num_bins)]
    for part in sorted(range(len(parts)), key=lambda part: (-weights[part], part)):
        weight, count, index = heapq.heappop(load)
        bins[index] += parts[part]
        heapq.heappush(load, (weight + weights[part], count + 1, index))
    return [sorted(rows) for rows in bins]


def _causal_pairs(length_K: np.ndarray) -> np.ndarray:
    """Return the number of causal attention scores of sequences of these lengths."""
    pairs_K: np.ndarray = length_K * (length_K + 1) / 2
    return pairs_K

"""Splits an update's rows into optimizer steps, data-parallel ranks and micro-batches.

The mini-batch of an optimizer step is a run of consecutive rows. Its rows are assigned to data
ranks longest first, each to the rank with the fewest tokens so far; the rows of a rank are split
the same way into micro-batches within the token budget. All data ranks get the same number of
micro-batches, because the pipeline schedule and the gradient all-reduce run in lock step. An
interleaved pipeline schedule needs a multiple of the pipeline size; the number is rounded up before
the rows are assigned, so that no micro-batch is empty while another has two rows. The plan is
deterministic: ties go to the lowest index.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mega_agentrl.types.batch import TrainBatch


def minibatch_masks(mask_BT: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """Yield one [B, T] bool mask per optimizer step: `mask_BT` restricted to that step's rows.

    Each step has about equally many consecutive rows. There are at most as many steps as rows. The
    masks are disjoint and their union is `mask_BT`.
    """
    num_rows = mask_BT.shape[0]
    num_steps = max(1, min(num_steps, num_rows))
    for start, stop in pairwise(num_rows * step // num_steps for step in range(num_steps + 1)):
        step_BT = mask_BT.clone().bool()
        step_BT[:start] = False
        step_BT[stop:] = False
        yield step_BT


def minibatch_row_lengths(batch: TrainBatch, num_steps: int) -> list[list[int]]:
    """Return, by optimizer step, the number of input tokens of each row that is trained on.

    The input is the prompt and the response without its last token, which predicts nothing.
    """
    prompts = [len(token_ids) for token_ids in batch.prompt_ids]
    lengths = batch.length_B.tolist()
    return [
        [
            max(1, prompts[row] + lengths[row] - 1)
            for row in mask_BT.any(1).nonzero().flatten().tolist()
        ]
        for mask_BT in minibatch_masks(batch.mask_BT, num_steps)
    ]


def plan_micro_batches(
    lengths: Sequence[int], *, num_data: int, budget_tokens: int, num_multiple: int = 1
) -> list[list[list[int]]]:
    """Return the row indices of each micro-batch, indexed by [data rank][micro-batch].

    Every row occurs exactly once, and the rows of a micro-batch keep their order. With fewer rows
    than micro-batches some micro-batches are empty; their passes contribute nothing.

    Args:
        lengths: number of tokens of each row.
        num_data: number of data-parallel ranks.
        budget_tokens: maximum number of tokens in a micro-batch.
        num_multiple: the number of micro-batches of each rank is a multiple of this.

    Raises:
        ValueError: there are no rows, a single row exceeds the budget, or a count is below 1.
    """
    if min(num_data, num_multiple, len(lengths)) < 1:
        raise ValueError(
            f"plan_micro_batches: {len(lengths)} rows over {num_data} data ranks in multiples of "
            f"{num_multiple}; expected at least one of each; probable cause: every trajectory "
            "was filtered out"
        )
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > budget_tokens:
        raise ValueError(
            f"optim.micro_batch_tokens={budget_tokens}: row {longest} alone has "
            f"{lengths[longest]} tokens; expected a budget of at least the longest prompt "
            "plus response"
        )
    ranks = _balance_into_bins(range(len(lengths)), lengths, num_data)
    totals = [sum(lengths[row] for row in rows) for rows in ranks]
    num_micro = -(-max(1, -(-max(totals) // budget_tokens)) // num_multiple) * num_multiple
    while True:
        cut = [_balance_into_bins(rows, lengths, num_micro) for rows in ranks]
        if all(sum(lengths[r] for r in micro) <= budget_tokens for rows in cut for micro in rows):
            return cut
        num_micro += num_multiple


def token_imbalance(steps: Sequence[Sequence[int]], num_data: int) -> float:
    """Return the tokens of the fullest data rank divided by the mean over the ranks.

    In each optimizer step all ranks wait for the fullest, so the maxima of the steps are summed.
    The result is at least 1, and 1 without any row.

    Args:
        steps: number of tokens of each row, by optimizer step.
        num_data: number of data-parallel ranks.
    """
    fullest = total = 0
    for lengths in steps:
        ranks = _balance_into_bins(range(len(lengths)), lengths, num_data)
        fullest += max(sum(lengths[row] for row in rows) for rows in ranks)
        total += sum(lengths)
    return fullest * num_data / total if total else 1.0


def _balance_into_bins(
    rows: Sequence[int], lengths: Sequence[int], num_bins: int
) -> list[list[int]]:
    """Split rows into bins of about equal tokens: longest first, to the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [(0, 0, index) for index in range(num_bins)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        tokens, count, index = heapq.heappop(load)
        bins[index].append(row)
        heapq.heappush(load, (tokens + lengths[row], count + 1, index))
    return [sorted(rows) for rows in bins]

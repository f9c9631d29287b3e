"""Which row is trained on which data rank in which micro-batch.

Rows are dealt to data ranks longest first, each to the rank with the fewest tokens so far;
each rank's rows are then cut the same way into micro-batches within the token budget. All
data ranks get the same number of micro-batches, because the pipeline schedule and the
gradient all-reduce go in step; where that number is rounded up (a pipeline with virtual stages
wants a multiple of its size), the rows are dealt to the larger number, so that no micro-batch
is empty while another has two rows. Pure and deterministic: ties go to the lowest index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int], *, num_data: int, budget_tokens: int, num_multiple: int = 1
) -> list[list[list[int]]]:
    """Row indices by [data rank][micro-batch]; every row exactly once.

    lengths: tokens of each row. budget_tokens: most tokens in one micro-batch. num_multiple:
    what the number of micro-batches of a data rank is a multiple of.
    With fewer rows than micro-batches some are empty: the rank then runs a forward pass
    that adds nothing. Rows inside a micro-batch keep their order.
    Raises `ValueError` for no rows, a row that alone exceeds the budget, or a bad count.
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
    ranks = _deal(range(len(lengths)), lengths, num_data)
    totals = [sum(lengths[row] for row in rows) for rows in ranks]
    num_micro = -(-max(1, -(-max(totals) // budget_tokens)) // num_multiple) * num_multiple
    while True:
        cut = [_deal(rows, lengths, num_micro) for rows in ranks]
        if all(sum(lengths[r] for r in micro) <= budget_tokens for rows in cut for micro in rows):
            return cut
        num_micro += num_multiple


def token_imbalance(steps: Sequence[Sequence[int]], num_data: int) -> float:
    """Tokens of the fullest data rank over the mean of the ranks, as the plan deals them; >= 1.

    steps: tokens of each row, by optimizer step. In each step the ranks wait for the fullest, so
    these are what adds up. 1 where there is no row.
    """
    fullest = total = 0
    for lengths in steps:
        ranks = _deal(range(len(lengths)), lengths, num_data)
        fullest += max(sum(lengths[row] for row in rows) for rows in ranks)
        total += sum(lengths)
    return fullest * num_data / total if total else 1.0


def _deal(rows: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Rows into bins of about equal tokens: longest first, to the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [(0, 0, index) for index in range(num_bins)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        tokens, count, index = heapq.heappop(load)
        bins[index].append(row)
        heapq.heappush(load, (tokens + lengths[row], count + 1, index))
    return [sorted(rows) for rows in bins]

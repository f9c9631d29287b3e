"""Statistics of the vocabulary head in the arithmetic of `numerics`.

The sums of a token do not depend on how the vocabulary is split over ranks, and are those of an
engine that has all logits of the token. For that, the ranks first agree on the largest logit.

Gradients come from `torch_kernel`, with these statistics.

Shape suffixes: C tokens of a chunk, V local vocabulary rows, D hidden width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mega_agentrl.numerics.exact_sums import FixedPointRows, exact_matmul
from mega_agentrl.numerics.layers import softmax_sums

# Tensors of the size of a chunk's logits that exist at once, of 8 bytes an element.
_NUM_TILES = 8


def chunk_tokens(num_rows: int, num_bytes: int) -> int:
    """Return how many tokens to process at once within `num_bytes`, for `num_rows` of a rank."""
    return max(1, num_bytes // (8 * _NUM_TILES * max(1, num_rows)))


def global_stats(
    hidden_CD: torch.Tensor,
    rows: FixedPointRows,
    column_C: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Compute the `[4, C]` float64 statistics of the logits of all ranks.

    The statistics are defined in `vocab.partial_softmax`.

    Args:
        hidden_CD: `[C, D]` hidden states.
        rows: `[V, D]` rows of the output layer on this rank.
        column_C: `[C]` int64 row that belongs to the target, -1 for none.
        temperature: Divisor of the logits.
        group: The tensor ranks; None for one.
    """
    logits_CV = exact_matmul(hidden_CD, rows, num_terms=hidden_CD.size(1)).to(hidden_CD.dtype)
    largest_2C = logits_CV.new_full((2, len(hidden_CD)), -torch.inf, dtype=torch.float64)
    if logits_CV.size(1):
        largest_2C[0] = logits_CV.amax(dim=1)
        target_C = logits_CV.gather(1, column_C.clamp_min(0)[:, None]).squeeze(1).double()
        largest_2C[1] = target_C.masked_fill_(column_C < 0, -torch.inf)
    if group is not None:
        dist.all_reduce(largest_2C, dist.ReduceOp.MAX, group=group)
    max_C, target_C = largest_2C
    sums = softmax_sums(logits_CV, max_C, temperature)
    sums_2C = torch.stack([sums.exponentials_N, sums.weighted_N])
    if group is not None:
        dist.all_reduce(sums_2C, group=group)
    return torch.stack([max_C / temperature, *sums_2C, target_C / temperature])

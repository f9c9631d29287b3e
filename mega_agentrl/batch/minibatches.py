"""Splits the rows of an update into the mini-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mega_agentrl.types.batch import TrainBatch


def minibatch_masks(mask_BT: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """Yield one [B, T] bool mask per optimizer step: `mask_BT` restricted to that step's rows.

    Each step has a run of consecutive rows, and the runs have about equal length. There are at most
    as many steps as rows. The masks are disjoint and their union is `mask_BT`.
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

"""Which tokens are trained on in which optimizer step of an update: runs of rows, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mega_agentrl.types.batch import TrainBatch


def step_masks(mask_BT: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """[B, T] bool masks, one a step: the part of mask_BT in that step's rows.

    The rows are cut into num_steps runs of about equal numbers, at most one a row, so that
    the masks add up to mask_BT and never overlap.
    """
    num_rows = mask_BT.shape[0]
    num_steps = max(1, min(num_steps, num_rows))
    for start, stop in pairwise(num_rows * step // num_steps for step in range(num_steps + 1)):
        step_BT = mask_BT.clone().bool()
        step_BT[:start] = False
        step_BT[stop:] = False
        yield step_BT


def step_lengths(batch: TrainBatch, num_steps: int) -> list[list[int]]:
    """Tokens that a model reads of each row that is trained on, by optimizer step.

    Prompt and response without the last token, which predicts nothing.
    """
    prompts = [len(token_ids) for token_ids in batch.prompt_ids]
    lengths = batch.length_B.tolist()
    return [
        [
            max(1, prompts[row] + lengths[row] - 1)
            for row in mask_BT.any(1).nonzero().flatten().tolist()
        ]
        for mask_BT in step_masks(batch.mask_BT, num_steps)
    ]

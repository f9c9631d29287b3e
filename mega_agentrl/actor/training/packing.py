"""Packing of batch rows into micro-batches without padding between the rows.

The sequence of a row is prompt + response, without its last token, which has no successor to
predict. Response token t of a row with P prompt tokens is predicted at position P + t - 1 of
the row.

Padding is added only where the parallel layout requires it: at the end of each row for context
parallelism, which splits every row into equal chunks (`parallel.context_parallel`), and as one
more row at the end for sequence parallelism, which splits the rank's tokens evenly. No real
token attends to padding, and nothing is predicted there.

Shape suffixes: S packed tokens of this rank, W of all context ranks, N predicted tokens of this
rank, R rows of the micro-batch, T response positions of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.parallel.context_parallel import rank_token_indices, row_length_multiple
from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass, as held by one context rank."""

    rows: tuple[int, ...]
    """Rows of the batch in packed order; empty for a micro-batch of padding only."""
    token_S: torch.Tensor
    """`[S]` int64 token ids."""
    position_S: torch.Tensor
    """`[S]` int64 position of each token within its row."""
    start_R: tuple[int, ...]
    """First of the W packed tokens of each row and of the padding row, if any, followed by W;
    equal on all context ranks."""
    predict_N: torch.Tensor
    """`[N]` index in `token_S` of the positions whose next token is evaluated."""
    target_N: torch.Tensor
    """`[N]` the evaluated tokens."""
    row_N: torch.Tensor
    """`[N]` row of each evaluated token in `[R, T]`."""
    column_N: torch.Tensor
    """`[N]` response position of each evaluated token in `[R, T]`."""
    context_rank: int = 0
    """The context rank that holds these tokens; each token is held by one rank."""
    context_size: int = 1

    def predicted_mask(self, num_positions: int) -> torch.Tensor:
        """Return `[R, T]` bool, the evaluated tokens that this context rank predicts."""
        return self.scatter_to_rows(torch.ones_like(self.column_N, dtype=torch.bool), num_positions)

    def scatter_to_rows(self, value_N: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Scatter `[N]` values to `[R, T]` with gradients, 0 where nothing was evaluated."""
        out_RT = value_N.new_zeros(len(self.rows), num_positions)
        return out_RT.index_put((self.row_N, self.column_N), value_N)


def response_mask(batch: TrainBatch) -> torch.Tensor:
    """Return the `[B, T]` bool mask of the positions before the end of each response."""
    width = batch.response_BT.size(1)
    return torch.arange(width)[None, :] < batch.length_B[:, None]


def row_lengths(batch: TrainBatch) -> list[int]:
    """Return the number of tokens that the model processes for each row."""
    return [
        max(1, len(prompt) + length - 1)
        for prompt, length in zip(batch.prompt_ids, batch.length_B.tolist(), strict=True)
    ]


def pack_rows(
    batch: TrainBatch,
    rows: Sequence[int],
    select_BT: torch.Tensor,
    device: torch.device,
    *,
    multiple: int = 1,
    context_rank: int = 0,
    context_size: int = 1,
) -> MicroBatch:
    """Pack rows of a batch for one context rank.

    Args:
        batch: All rows.
        rows: Rows to pack; without any, the micro-batch is padding only.
        select_BT: `[B, T]` bool, the response tokens to evaluate.
        device: Device of the tensors.
        multiple: S is padded to a multiple of this (the tensor size under sequence parallelism).
        context_rank: The rank whose tokens are returned.
        context_size: Number of context ranks.

    Raises:
        ValueError: If a row has no prompt, because nothing predicts its first token.
    """
    for row in rows:
        if not batch.prompt_ids[row]:
            raise ValueError(
                f"TrainBatch: row {row} has an empty prompt; expected at least 1 token"
            )
    lengths = row_lengths(batch)
    start_R = _padded_row_starts([lengths[row] for row in rows], multiple, context_size)
    token_W = torch.zeros(start_R[-1], dtype=torch.int64)
    for start, row in zip(start_R, rows, strict=False):
        sequence = [*batch.prompt_ids[row], *batch.response_BT[row, : batch.length_B[row]].tolist()]
        token_W[start : start + lengths[row]] = torch.tensor(sequence[: lengths[row]])
    held_S = rank_token_indices(start_R, context_rank, context_size)
    position_W = torch.cat([torch.arange(stop - start) for start, stop in pairwise(start_R)])
    predict_N, row_N, column_N = _prediction_indices(batch, rows, select_BT, start_R, held_S)
    target_N = batch.response_BT[torch.tensor(rows, dtype=torch.int64)[row_N], column_N]
    return MicroBatch(
        rows=tuple(rows),
        token_S=token_W[held_S].to(device),
        position_S=position_W[held_S].to(device),
        start_R=start_R,
        predict_N=predict_N.to(device),
        target_N=target_N.to(device),
        row_N=row_N.to(device),
        column_N=column_N.to(device),
        context_rank=context_rank,
        context_size=context_size,
    )


def _padded_row_starts(lengths: Sequence[int], multiple: int, context_size: int) -> tuple[int, ...]:
    """Return the first token of each padded row and of the padding row, if any, and W."""
    unit = row_length_multiple(context_size)
    padded = [round_up(length, unit) for length in lengths]
    # W must suit the row multiple and S = W / C the requested one.
    step = math.lcm(unit, multiple * context_size)
    missing = -sum(padded) % step if padded else step
    return tuple(accumulate([*padded, missing] if missing else padded, initial=0))


def _prediction_indices(
    batch: TrainBatch,
    rows: Sequence[int],
    select_BT: torch.Tensor,
    start_R: Sequence[int],
    held_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return predict_N, row_N and column_N of the selected tokens predicted on this rank."""
    index = torch.tensor(rows, dtype=torch.int64)
    end_R = batch.length_B[index, None]
    select_RT = select_BT[index].bool() & (torch.arange(select_BT.size(1)) < end_R)
    row_N, column_N = torch.nonzero(select_RT).unbind(1)
    shift_R = torch.tensor(
        [start + len(batch.prompt_ids[row]) - 1 for start, row in zip(start_R, rows, strict=False)],
        dtype=torch.int64,
    )
    local_index_W = torch.full((start_R[-1],), -1)
    local_index_W[held_S] = torch.arange(len(held_S))
    predict_N = local_index_W[shift_R[row_N] + column_N]
    own_N = predict_N >= 0
    return predict_N[own_N], row_N[own_N], column_N[own_N]

"""Rows of a batch as one packed micro-batch: no padding between trajectories.

The sequence of a row is prompt + response; a model reads it all but its last token, which
nothing follows. The response token t of a row with P prompt tokens is predicted at position
P + t - 1 of that row's sequence.

Padding is added only where the layout asks for it: at the end of each row for context ranks,
which hold two chunks of every row (`context`), and as a row of its own at the end of the packing
for sequence parallelism, which cuts the rank's tokens evenly. No token sees the padding after
it, and nothing is predicted there.

Suffixes: S packed tokens of this rank, W of all context ranks, N predicted tokens of this rank,
R rows of the micro-batch, T response positions of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.context import held_tokens, row_multiple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass of one context rank.

    rows: rows of the batch in packed order; empty for a pass that only keeps the schedule.
    token_S, position_S: [S] int64 token ids and their positions within their row.
    start_R: first token of each row in the whole packing, of the row of padding where there is
    one, and W; equal on all context ranks.
    predict_N: [N] packed positions whose next token is looked at; target_N: [N] that token.
    row_N, column_N: [N] where it belongs in [R, T].
    context_rank, context_size: whose tokens these are; every token of a row is with one rank.
    """

    rows: tuple[int, ...]
    token_S: torch.Tensor
    position_S: torch.Tensor
    start_R: tuple[int, ...]
    predict_N: torch.Tensor
    target_N: torch.Tensor
    row_N: torch.Tensor
    column_N: torch.Tensor
    context_rank: int = 0
    context_size: int = 1

    def predicted(self, num_positions: int) -> torch.Tensor:
        """[R, T] bool, the looked-at tokens that this rank predicts: all but for context ranks."""
        return self.to_rows(torch.ones_like(self.column_N, dtype=torch.bool), num_positions)

    def to_rows(self, value_N: torch.Tensor, num_positions: int) -> torch.Tensor:
        """[N] values laid out as [R, T], 0 where nothing was looked at; keeps gradients."""
        out_RT = value_N.new_zeros(len(self.rows), num_positions)
        return out_RT.index_put((self.row_N, self.column_N), value_N)


def row_lengths(batch: TrainBatch) -> list[int]:
    """Tokens a model reads for each row."""
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
    """Pack rows of a batch, at least one token of padding where there are none.

    select_BT: [B, T] bool, which response tokens to predict. multiple: what S must be a multiple
    of (the tensor size under sequence parallelism). context_rank, context_size: whose part.
    Raises `ValueError` for a row without a prompt: its first token has nothing before it.
    """
    for row in rows:
        if not batch.prompt_ids[row]:
            raise ValueError(
                f"TrainBatch: row {row} has an empty prompt; expected at least 1 token"
            )
    lengths = row_lengths(batch)
    start_R = _starts([lengths[row] for row in rows], multiple, context_size)
    token_W = torch.zeros(start_R[-1], dtype=torch.int64)
    for start, row in zip(start_R, rows, strict=False):
        sequence = [*batch.prompt_ids[row], *batch.response_BT[row, : batch.length_B[row]].tolist()]
        token_W[start : start + lengths[row]] = torch.tensor(sequence[: lengths[row]])
    held_S = held_tokens(start_R, context_rank, context_size)
    position_W = torch.cat([torch.arange(stop - start) for start, stop in pairwise(start_R)])
    predict_N, row_N, column_N = _predictions(batch, rows, select_BT, start_R, held_S)
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


def _starts(lengths: Sequence[int], multiple: int, context_size: int) -> tuple[int, ...]:
    """First token of each padded row and of the padding's, if any, and W."""
    unit = row_multiple(context_size)
    padded = [-(-length // unit) * unit for length in lengths]
    # Whole rows and S = W / C in steps that both ask for.
    step = math.lcm(unit, multiple * context_size)
    missing = -sum(padded) % step if padded else step
    return tuple(accumulate([*padded, missing] if missing else padded, initial=0))


def _predictions(
    batch: TrainBatch,
    rows: Sequence[int],
    select_BT: torch.Tensor,
    start_R: Sequence[int],
    held_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """predict_N, row_N, column_N of the selected tokens that are predicted on this rank."""
    index = torch.tensor(rows, dtype=torch.int64)
    end_R = batch.length_B[index, None]
    select_RT = select_BT[index].bool() & (torch.arange(select_BT.size(1)) < end_R)
    row_N, column_N = torch.nonzero(select_RT).unbind(1)
    shift_R = torch.tensor(
        [start + len(batch.prompt_ids[row]) - 1 for start, row in zip(start_R, rows, strict=False)],
        dtype=torch.int64,
    )
    place_W = torch.full((start_R[-1],), -1)
    place_W[held_S] = torch.arange(len(held_S))
    predict_N = place_W[shift_R[row_N] + column_N]
    here_N = predict_N >= 0
    return predict_N[here_N], row_N[here_N], column_N[here_N]

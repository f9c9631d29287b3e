"""Packing of the rows of a data rank into micro-batches without padding between the rows.

The sequence of a row is prompt + response, without its last token, which has no successor to
predict. Response token t of a row with P prompt tokens is predicted at position P + t - 1 of
the row.

Padding is added only where the parallel layout requires it: at the end of each row for context
parallelism, which splits every row into equal chunks (`parallel.context_parallel`), and as one
more row at the end for sequence parallelism, which splits the rank's tokens evenly. No real
token attends to padding, and nothing is predicted there.

Shape suffixes: S packed tokens of this rank, W of all context ranks, N predicted tokens of this
rank, R rows of the micro-batch, T response positions of the batch, M response tokens of all rows of
the data rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.actor.parallel.context_parallel import rank_token_indices, row_length_multiple
from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.batch.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass, as held by one context rank."""

    rows: tuple[int, ...]
    """Indices of the rows of the data rank, in packed order; empty for a micro-batch of padding
    only."""
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


def pack_rows(
    rows: PackedRows,
    indices: Sequence[int],
    select_M: np.ndarray,
    device: torch.device,
    *,
    multiple: int = 1,
    context_rank: int = 0,
    context_size: int = 1,
) -> MicroBatch:
    """Pack rows of a data rank for one context rank.

    Args:
        rows: The rows of the data rank.
        indices: Indices of the rows to pack; without any, the micro-batch is padding only.
        select_M: `[M]` bool, which response tokens of all of `rows` to evaluate.
        device: Device of the tensors.
        multiple: S is padded to a multiple of this (the tensor size under sequence parallelism).
        context_rank: The rank whose tokens are returned.
        context_size: Number of context ranks.
    """
    lengths = [int(length) for length in rows.input_length_R[list(indices)]]
    start_R = _padded_row_starts(lengths, multiple, context_size)
    token_W = np.zeros(start_R[-1], dtype=np.int64)
    for start, length, index in zip(start_R, lengths, indices, strict=False):
        token_W[start : start + length] = rows.sequence(index)[:length]
    held_S = rank_token_indices(start_R, context_rank, context_size)
    position_W = torch.cat([torch.arange(stop - start) for start, stop in pairwise(start_R)])
    row_N, column_N = selected_tokens(rows, indices, select_M)
    prompt_R = rows.prompt_length_R[list(indices)]
    first_R = rows.start_R1[list(indices)] + prompt_R
    target_N = torch.from_numpy(rows.token_N[first_R[row_N] + column_N].astype(np.int64))
    local_index_W = torch.full((start_R[-1],), -1)
    local_index_W[held_S] = torch.arange(len(held_S))
    predicted_at_R = np.array(start_R[: len(lengths)], dtype=np.int64) + prompt_R - 1
    predict_N = local_index_W[torch.from_numpy(predicted_at_R[row_N] + column_N)]
    own_N = predict_N >= 0
    return MicroBatch(
        rows=tuple(indices),
        token_S=torch.from_numpy(token_W)[held_S].to(device),
        position_S=position_W[held_S].to(device),
        start_R=start_R,
        predict_N=predict_N[own_N].to(device),
        target_N=target_N[own_N].to(device),
        row_N=torch.from_numpy(row_N)[own_N].to(device),
        column_N=torch.from_numpy(column_N)[own_N].to(device),
        context_rank=context_rank,
        context_size=context_size,
    )


def selected_tokens(
    rows: PackedRows, indices: Sequence[int], select_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return row_N and column_N of the selected response tokens of the packed rows."""
    start_R1 = rows.response_start_R1
    columns = [np.flatnonzero(select_M[start_R1[index] : start_R1[index + 1]]) for index in indices]
    counts_R = np.array([len(column_T) for column_T in columns], dtype=np.int64)
    row_N = np.repeat(np.arange(len(columns)), counts_R)
    return row_N, np.concatenate([*columns, np.zeros(0, dtype=np.int64)])


def _padded_row_starts(lengths: Sequence[int], multiple: int, context_size: int) -> tuple[int, ...]:
    """Return the first token of each padded row and of the padding row, if any, and W."""
    unit = row_length_multiple(context_size)
    padded = [round_up(length, unit) for length in lengths]
    # W must suit the row multiple and S = W / C the requested one.
    step = math.lcm(unit, multiple * context_size)
    missing = -sum(padded) % step if padded else step
    return tuple(accumulate([*padded, missing] if missing else padded, initial=0))

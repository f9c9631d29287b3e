"""Rows of a batch as one packed micro-batch: no padding between trajectories.

The sequence of a row is prompt + response; a model reads it all but its last token, which
nothing follows. The response token t of a row with P prompt tokens is predicted at position
P + t - 1 of that row's sequence.

Suffixes: S packed tokens, N predicted tokens, R rows of the micro-batch, T response
positions of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass.

    rows: rows of the batch in packed order; empty for a pass that only keeps the schedule.
    token_S, position_S: [S] int64 token ids and their positions within their row.
    start_R: [R + 1] first packed token of each row, and S.
    predict_N: [N] packed positions whose next token is looked at; target_N: [N] that token.
    row_N, column_N: [N] where it belongs in [R, T].
    """

    rows: tuple[int, ...]
    token_S: torch.Tensor
    position_S: torch.Tensor
    start_R: tuple[int, ...]
    predict_N: torch.Tensor
    target_N: torch.Tensor
    row_N: torch.Tensor
    column_N: torch.Tensor

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
    batch: TrainBatch, rows: Sequence[int], select_BT: torch.Tensor, device: torch.device
) -> MicroBatch:
    """Pack rows of a batch.

    select_BT: [B, T] bool, which response tokens to predict.
    Raises `ValueError` for a row without a prompt: its first token has nothing before it.
    """
    if not rows:
        return _empty(device)
    tokens: list[torch.Tensor] = []
    predict: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    starts = [0]
    for row in rows:
        prompt, length = batch.prompt_ids[row], int(batch.length_B[row])
        if not prompt:
            raise ValueError(
                f"TrainBatch: row {row} has an empty prompt; expected at least 1 token"
            )
        sequence = torch.cat([torch.tensor(prompt), batch.response_BT[row, :length]])
        tokens.append(sequence[: max(1, len(sequence) - 1)])
        column = torch.nonzero(select_BT[row, :length]).flatten()
        columns.append(column)
        predict.append(column + (starts[-1] + len(prompt) - 1))
        starts.append(starts[-1] + len(tokens[-1]))
    counts = torch.tensor([len(column) for column in columns])
    row_N, column_N = torch.arange(len(rows)).repeat_interleave(counts), torch.cat(columns)
    batch_row_N = torch.tensor(list(rows))[row_N]
    return MicroBatch(
        rows=tuple(rows),
        token_S=torch.cat(tokens).to(device),
        position_S=torch.cat([torch.arange(len(part)) for part in tokens]).to(device),
        start_R=tuple(starts),
        predict_N=torch.cat(predict).to(device),
        target_N=batch.response_BT[batch_row_N, column_N].to(device),
        row_N=row_N.to(device),
        column_N=column_N.to(device),
    )


def _empty(device: torch.device) -> MicroBatch:
    none_N = torch.zeros(0, dtype=torch.int64, device=device)
    one_S = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        rows=(),
        token_S=one_S,
        position_S=one_S,
        start_R=(0, 1),
        predict_N=none_N,
        target_N=none_N,
        row_N=none_N,
        column_N=none_N,
    )

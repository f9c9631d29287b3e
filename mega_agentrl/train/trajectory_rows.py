"""Assignment of the rows of a batch to trajectories (`TrainBatch.trajectory_B`).

A trajectory counts once, however many rows it has: the values of its rows are summed, or
concatenated to one sequence with one zero position after each row.

Shape suffixes: B rows, A trajectories, T response positions, L positions of a whole trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from mega_agentrl.types.batch import TrainBatch


def row_trajectories(batch: TrainBatch) -> list[int]:
    """Return the index of each row's trajectory among those that the batch was packed from."""
    if batch.trajectory_B is None:
        return list(range(batch.num_rows))
    return [int(owner) for owner in batch.trajectory_B.tolist()]


def count_trained_trajectories(batch: TrainBatch) -> int:
    """Return the number of trajectories with a trained token."""
    is_trained_B = batch.mask_BT.any(1).tolist()
    pairs = zip(row_trajectories(batch), is_trained_B, strict=True)
    return len({owner for owner, is_trained in pairs if is_trained})


@dataclass(frozen=True, slots=True)
class TrajectoryRows:
    """The rows of a batch by trajectory, numbered in the order of their first rows."""

    first_row_A: torch.Tensor
    """[A] int64, the first row of each trajectory."""
    trajectory_B: torch.Tensor
    """[B] int64, the number of each row's trajectory."""
    is_one_row_each: bool
    """Whether every trajectory is a single row."""

    @classmethod
    def from_batch(cls, batch: TrainBatch) -> TrajectoryRows:
        """Number the trajectories of a batch."""
        if batch.trajectory_B is None:
            row_B = torch.arange(batch.num_rows)
            return cls(row_B, row_B, is_one_row_each=True)
        owners = row_trajectories(batch)
        first_rows: dict[int, int] = {}
        for row, owner in enumerate(owners):
            first_rows.setdefault(owner, row)
        numbers = {owner: number for number, owner in enumerate(first_rows)}
        trajectory_B = torch.tensor([numbers[owner] for owner in owners])
        return cls(torch.tensor(list(first_rows.values())), trajectory_B, is_one_row_each=False)

    def sum_rows(self, value_B: torch.Tensor) -> torch.Tensor:
        """Return the sum over each trajectory's rows, [A]."""
        return value_B.new_zeros(len(self.first_row_A)).index_add(0, self.trajectory_B, value_B)

    def sum_later_rows(self, value_B: torch.Tensor) -> torch.Tensor:
        """Return the sum over the later rows of the same trajectory, [B]."""
        if self.is_one_row_each:
            return torch.zeros_like(value_B)
        later_sums = [0.0] * len(self.first_row_A)
        sums: list[float] = []
        for trajectory, value in zip(
            self.trajectory_B.flip(0).tolist(), value_B.flip(0).tolist(), strict=True
        ):
            sums.append(later_sums[trajectory])
            later_sums[trajectory] += value
        return value_B.new_tensor(sums).flip(0)

    def concat_rows(self, grid_BT: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of each trajectory, each followed by one zero position, [A, L]."""
        if self.is_one_row_each:
            return grid_BT
        pieces: list[list[torch.Tensor]] = [[] for _ in self.first_row_A]
        for row, trajectory in enumerate(self.trajectory_B.tolist()):
            pieces[trajectory].append(pad(grid_BT[row, : int(length_B[row])], (0, 1)))
        return pad_sequence([torch.cat(rows) for rows in pieces], batch_first=True)

    def split_rows(self, grid_AL: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        """Undo `concat_rows`: [B, T] with 0 after the end of each row."""
        if self.is_one_row_each:
            return grid_AL
        grid_BT = grid_AL.new_zeros(batch.response_BT.shape)
        start = [0] * len(self.first_row_A)
        lengths = batch.length_B.tolist()
        for row, trajectory in enumerate(self.trajectory_B.tolist()):
            stop = start[trajectory] + lengths[row]
            grid_BT[row, : lengths[row]] = grid_AL[trajectory, start[trajectory] : stop]
            start[trajectory] = stop + 1
        return grid_BT

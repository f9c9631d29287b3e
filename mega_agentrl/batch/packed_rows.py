"""Rows of a batch without padding, in numpy arrays: the form in which ranks receive them.

Rows stand one after another, and offsets say where each begins. numpy arrays come out of Ray's
object store without a copy, so that the ranks of a machine share one.

Shape suffixes: R rows, R1 rows and the end, N tokens of all rows, M response tokens of all rows;
B rows and T response positions of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.batch import TrainBatch

POLICY_TARGETS = ("old_logp", "advantage", "ref_logp", "importance_weight")
"""Fields of `TrainBatch` that an update of the policy reads, without their suffix."""
CRITIC_TARGETS = ("value", "return")
"""Fields of `TrainBatch` that an update of the critic reads, without their suffix."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedRows:
    """Token ids of some rows of a batch."""

    row_R: np.ndarray
    """[R] int64 number of each row in the whole batch."""
    start_R1: np.ndarray
    """[R + 1] int64 position of each row's first token in `token_N`, and N."""
    prompt_length_R: np.ndarray
    """[R] int64 number of prompt tokens of each row."""
    token_N: np.ndarray
    """[N] int32 prompt and response of each row."""
    num_positions: int
    """T, the response positions of the whole batch, to which the rows of a micro-batch are
    padded."""

    def __post_init__(self) -> None:
        sizes = (len(self.row_R), len(self.start_R1) - 1, len(self.prompt_length_R))
        if len(set(sizes)) > 1 or len(self.token_N) != self.start_R1[-1]:
            raise ValueError(
                f"PackedRows: got {sizes[0]} row numbers, {sizes[1] + 1} offsets, {sizes[2]} "
                f"prompt lengths and {len(self.token_N)} tokens, expected one offset more than "
                f"rows, and {self.start_R1[-1]} tokens from the last offset"
            )

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[np.ndarray],
        *,
        row_R: np.ndarray,
        prompt_lengths: Sequence[int],
        num_positions: int,
    ) -> PackedRows:
        """Pack rows from their tokens, prompt and response."""
        return cls(
            row_R=row_R,
            start_R1=_offsets(map(len, sequences)),
            prompt_length_R=np.array(prompt_lengths, dtype=np.int64),
            token_N=_concatenate(sequences, np.int32),
            num_positions=num_positions,
        )

    @classmethod
    def from_batch(cls, batch: TrainBatch) -> PackedRows:
        """Pack all rows of a batch.

        Raises:
            ValueError: A row has no prompt, because nothing predicts its first token.
        """
        response_BT, lengths = batch.response_BT.numpy(), batch.length_B.tolist()
        for row, prompt in enumerate(batch.prompt_ids):
            if not prompt:
                raise ValueError(
                    f"TrainBatch: row {row} has an empty prompt; expected at least 1 token"
                )
        sequences = [
            np.concatenate([np.array(prompt, dtype=np.int32), response_T[:length]], dtype=np.int32)
            for prompt, response_T, length in zip(
                batch.prompt_ids, response_BT, lengths, strict=True
            )
        ]
        return cls.from_sequences(
            sequences,
            row_R=np.arange(len(sequences)),
            prompt_lengths=[len(prompt) for prompt in batch.prompt_ids],
            num_positions=response_BT.shape[1],
        )

    @classmethod
    def merge(cls, parts: Sequence[PackedRows], row_R: np.ndarray) -> PackedRows:
        """Return the rows with these numbers, in their order, each from the part that has it."""
        found = {int(row): (part, index) for part in parts for index, row in enumerate(part.row_R)}
        places = [found[int(row)] for row in row_R]
        return cls.from_sequences(
            [part.sequence(index) for part, index in places],
            row_R=row_R,
            prompt_lengths=[part.prompt_length_R[index] for part, index in places],
            num_positions=parts[0].num_positions,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return len(self.row_R)

    @property
    def response_length_R(self) -> np.ndarray:
        """[R] int64 number of response tokens of each row."""
        lengths_R: np.ndarray = np.diff(self.start_R1) - self.prompt_length_R
        return lengths_R

    @property
    def response_start_R1(self) -> np.ndarray:
        """[R + 1] int64 position of each row's first response token among those of all rows."""
        return _offsets(self.response_length_R.tolist())

    @property
    def input_length_R(self) -> np.ndarray:
        """[R] int64 number of tokens that the model reads: the last one predicts nothing."""
        lengths_R: np.ndarray = np.maximum(1, np.diff(self.start_R1) - 1)
        return lengths_R

    def sequence(self, index: int) -> np.ndarray:
        """Return the prompt and response of the row at an index, int32."""
        tokens_S: np.ndarray = self.token_N[self.start_R1[index] : self.start_R1[index + 1]]
        return tokens_S

    def take(self, indices: Sequence[int] | np.ndarray) -> PackedRows:
        """Return the rows at these indices, in their order."""
        index_R = np.array(indices, dtype=np.int64)
        return self.from_sequences(
            [self.sequence(index) for index in index_R],
            row_R=self.row_R[index_R],
            prompt_lengths=self.prompt_length_R[index_R].tolist(),
            num_positions=self.num_positions,
        )

    def with_token_appended(self) -> PackedRows:
        """Return the rows, each with one more response token, whose id is 0."""
        return self.from_sequences(
            [np.append(self.sequence(index), np.int32(0)) for index in range(self.num_rows)],
            row_R=self.row_R,
            prompt_lengths=self.prompt_length_R.tolist(),
            num_positions=self.num_positions + 1,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedTargets:
    """What an update reads of the response tokens of some rows, beside the tokens themselves.

    The fields are those of `TrainBatch`, [M] in place of [B, T]; None where the batch has none.
    """

    start_R1: np.ndarray
    """[R + 1] int64 position of each row's first response token, and M."""
    num_positions: int
    """T, to which the rows of a micro-batch are padded."""
    mask_M: np.ndarray
    old_logp_M: np.ndarray | None = None
    advantage_M: np.ndarray | None = None
    ref_logp_M: np.ndarray | None = None
    importance_weight_M: np.ndarray | None = None
    value_M: np.ndarray | None = None
    return_M: np.ndarray | None = None
    kl_weight_M: np.ndarray | None = None
    """Weight of each token's KL term; None for the configured coefficient."""

    @classmethod
    def from_batch(
        cls,
        batch: TrainBatch,
        row_R: np.ndarray,
        names: Iterable[str] = (),
        kl_weight_BT: torch.Tensor | None = None,
    ) -> PackedTargets:
        """Pack mask and fields `names` (as `POLICY_TARGETS`) of the rows with these numbers."""
        by_name = {"mask": batch.mask_BT, "kl_weight": kl_weight_BT}
        by_name |= {name: getattr(batch, f"{name}_BT") for name in names}
        length_R = batch.length_B[torch.from_numpy(row_R)]
        return cls(
            start_R1=_offsets(length_R.tolist()),
            num_positions=batch.response_BT.size(1),
            **{
                f"{name}_M": pack_values(value_BT, row_R, length_R)
                for name, value_BT in by_name.items()
                if value_BT is not None
            },
        )

    def padded(self, name: str, indices: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a field, such as `old_logp`, of the rows at these indices, `[R, T]`.

        It is 0 after the end of a row.
        """
        value_M: np.ndarray = getattr(self, f"{name}_M")
        padded_RT = np.zeros((len(indices), self.num_positions), dtype=value_M.dtype)
        for value_T, index in zip(padded_RT, indices, strict=True):
            start, stop = self.start_R1[index], self.start_R1[index + 1]
            value_T[: stop - start] = value_M[start:stop]
        return torch.from_numpy(padded_RT).to(device)


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedScores:
    """Results of a pass over some rows."""

    row_R: np.ndarray
    """[R] int64 number of each row in the whole batch."""
    values: tuple[np.ndarray, ...]
    """[M] float32 values of the rows' response tokens, or one value per row, in the order of
    `row_R`."""


def pack_values(value_BT: torch.Tensor, row_R: np.ndarray, length_R: torch.Tensor) -> np.ndarray:
    """Return [M], the values of these rows up to their lengths."""
    inside_RT = torch.arange(value_BT.size(1))[None, :] < length_R[:, None]
    values_M: np.ndarray = value_BT[torch.from_numpy(row_R)][inside_RT].numpy()
    return values_M


def unpack_scores(
    answers: Sequence[PackedScores | None], length_B: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, ...]:
    """Return the [B, T] float32 values of all ranks that have results, 0 after a row's end."""
    parts = [part for part in answers if part is not None]
    numbers = sorted(int(row) for part in parts for row in part.row_R)
    assert numbers == list(range(len(length_B))), "ranks must answer for each row once"
    outputs = tuple(torch.zeros(len(length_B), num_positions) for _ in parts[0].values)
    for part in parts:
        index_R = torch.from_numpy(part.row_R.copy())
        inside_RT = torch.arange(num_positions)[None, :] < length_B[index_R, None]
        for output_BT, value_M in zip(outputs, part.values, strict=True):
            padded_RT = torch.zeros(inside_RT.shape)
            padded_RT[inside_RT] = torch.tensor(value_M)
            output_BT[index_R] = padded_RT
    return outputs


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum(np.fromiter(chain((0,), lengths), dtype=np.int64))


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)

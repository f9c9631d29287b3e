"""Rows of a batch without padding, in numpy arrays: the form in which ranks receive them.

Rows stand one after another in depth-first order of their trees (`batch.tree_order`), and a token
that rows share is stored once. numpy arrays come out of Ray's object store without a copy, so that
the ranks of a machine share one.

Shape suffixes: R rows, R1 rows and the end, N stored tokens, M response tokens of all rows, shared
ones counted in each; B rows and T response positions of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.batch.tree_order import RowLengths, row_lengths, shared_between

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.batch import TrainBatch

POLICY_TARGETS = ("old_logp", "advantage", "ref_logp", "importance_weight")
"""Fields of `TrainBatch` that an update of the policy reads, without their suffix."""
CRITIC_TARGETS = ("value", "return")
"""Fields of `TrainBatch` that an update of the critic reads, without their suffix."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedRows(RowLengths):
    """Token ids of some rows of a batch in depth-first order; a shared token is stored once."""

    prompt_length_R: np.ndarray
    """[R] int64 number of prompt tokens of each row."""
    token_N: np.ndarray
    """[N] int32 tokens of each row after those that it shares with the row before it."""
    num_positions: int
    """T, the response positions of the whole batch, to which the rows of a micro-batch are
    padded."""

    def __post_init__(self) -> None:
        sizes = {len(self.row_R), len(self.length_R), len(self.prompt_length_R)}
        num_own = int((self.length_R - self.shared_length_R).sum())
        if len(sizes) > 1 or len(self.token_N) != num_own:
            raise ValueError(
                f"PackedRows: got {len(self.row_R)} row numbers, {len(self.length_R)} lengths, "
                f"{len(self.prompt_length_R)} prompt lengths and {len(self.token_N)} tokens, "
                f"expected as many of the first three, and {num_own} tokens from the lengths"
            )

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[np.ndarray],
        *,
        row_R: np.ndarray,
        prompt_lengths: Sequence[int] | np.ndarray,
        num_positions: int,
        shared_length_R: np.ndarray | None = None,
    ) -> PackedRows:
        """Pack rows from their tokens, prompt and response; without lengths nothing is shared."""
        length_R = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        if shared_length_R is None:
            shared_length_R = np.zeros_like(length_R)
        own = [tokens[size:] for tokens, size in zip(sequences, shared_length_R, strict=True)]
        return cls(
            row_R=row_R,
            length_R=length_R,
            shared_length_R=shared_length_R,
            prompt_length_R=np.array(prompt_lengths, dtype=np.int64),
            token_N=np.concatenate(own) if own else np.zeros(0, dtype=np.int32),
            num_positions=num_positions,
        )

    @classmethod
    def from_batch(cls, batch: TrainBatch, *, share: bool = True) -> PackedRows:
        """Pack all rows of a batch; `share` as in `row_lengths`.

        Raises:
            ValueError: A row has no prompt, because nothing predicts its first token.
        """
        for row, prompt in enumerate(batch.prompt_ids):
            if not prompt:
                raise ValueError(
                    f"TrainBatch: row {row} has an empty prompt; expected at least 1 token"
                )
        lengths = row_lengths(batch, share=share)
        response_BT, length_B = batch.response_BT.numpy(), batch.length_B.tolist()
        sequences = [
            np.concatenate(
                [np.array(batch.prompt_ids[row], np.int32), response_BT[row, : length_B[row]]],
                dtype=np.int32,
            )
            for row in lengths.row_R
        ]
        return cls.from_sequences(
            sequences,
            row_R=lengths.row_R,
            prompt_lengths=[len(batch.prompt_ids[row]) for row in lengths.row_R],
            num_positions=response_BT.shape[1],
            shared_length_R=lengths.shared_length_R,
        )

    @classmethod
    def merge(
        cls, parts: Sequence[PackedRows], row_R: np.ndarray, shared_length_R: np.ndarray
    ) -> PackedRows:
        """Return the rows with these numbers, in their order, each from the part that has it."""
        found = {
            int(row): (tokens_S, length)
            for part in parts
            for row, tokens_S, length in zip(
                part.row_R, part.sequences(range(part.num_rows)), part.prompt_length_R, strict=True
            )
        }
        return cls.from_sequences(
            [found[int(row)][0] for row in row_R],
            row_R=row_R,
            prompt_lengths=[found[int(row)][1] for row in row_R],
            num_positions=parts[0].num_positions,
            shared_length_R=shared_length_R,
        )

    @property
    def response_length_R(self) -> np.ndarray:
        """[R] int64 number of response tokens of each row."""
        lengths_R: np.ndarray = self.length_R - self.prompt_length_R
        return lengths_R

    @property
    def response_start_R1(self) -> np.ndarray:
        """[R + 1] int64 position of each row's first response token among those of all rows."""
        return _offsets(self.response_length_R.tolist())

    def sequences(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return prompt and response of the rows at ascending indices, int32."""
        wanted = {int(index) for index in indices}
        start_R1 = _offsets((self.length_R - self.shared_length_R).tolist())
        path = np.zeros(self.length_R.max(initial=0), dtype=np.int32)
        found = []
        for index in range(max(wanted, default=-1) + 1):
            shared, length = self.shared_length_R[index], self.length_R[index]
            path[shared:length] = self.token_N[start_R1[index] : start_R1[index + 1]]
            if index in wanted:
                found.append(path[:length].copy())
        return found

    def take(self, indices: Sequence[int] | np.ndarray) -> PackedRows:
        """Return the rows at these ascending indices."""
        index_R = np.array(indices, dtype=np.int64)
        return self.from_sequences(
            self.sequences(index_R),
            row_R=self.row_R[index_R],
            prompt_lengths=self.prompt_length_R[index_R],
            num_positions=self.num_positions,
            shared_length_R=shared_between(self.shared_length_R, index_R),
        )

    def with_token_appended(self) -> PackedRows:
        """Return the rows, each with one more response token, whose id is 0."""
        return self.from_sequences(
            [np.append(tokens_S, np.int32(0)) for tokens_S in self.sequences(range(self.num_rows))],
            row_R=self.row_R,
            prompt_lengths=self.prompt_length_R,
            num_positions=self.num_positions + 1,
            shared_length_R=self.shared_length_R,
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

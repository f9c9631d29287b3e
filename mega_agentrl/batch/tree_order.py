"""Rows of rollout trees in depth-first order, and how many tokens each shares with the one before.

Rows of one tree share a prefix: the prompt, and where they were forked the response up to the fork.
If the rows of a tree stand in depth-first order, the number of tokens that each row shares with the
one before it describes the whole tree: rows i < j share min(shared_length[i + 1 .. j]) tokens.
Tokens are shared by identity, that is the same sampling event, the same prompt or the same tool
answer before a fork, never because their ids happen to be equal.

The input of a row is what the model reads: the row without its last token, because nothing follows
that token which could be predicted from it.

Shape suffixes: B rows of a batch, R some of its rows, in depth-first order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch


@dataclass(slots=True, kw_only=True, frozen=True)
class RowLengths:
    """Lengths of some rows of a batch in depth-first order of their trees."""

    row_R: np.ndarray
    """[R] int64 number of each row in the whole batch."""
    length_R: np.ndarray
    """[R] int64 number of tokens, prompt and response."""
    shared_length_R: np.ndarray
    """[R] int64 number of leading tokens that a row shares with the row before it among these R
    rows; 0 where a tree begins."""

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return len(self.row_R)

    @property
    def input_length_R(self) -> np.ndarray:
        """[R] int64 number of tokens of each row's input."""
        lengths_R: np.ndarray = np.maximum(1, self.length_R - 1)
        return lengths_R

    @property
    def shared_input_length_R(self) -> np.ndarray:
        """[R] int64 number of leading tokens that a row's input shares with the one before it."""
        input_R = self.input_length_R
        shared_R: np.ndarray = np.minimum(self.shared_length_R, input_R)
        shared_R[1:] = np.minimum(shared_R[1:], input_R[:-1])
        return shared_R


def row_lengths(batch: TrainBatch, *, share: bool = True) -> RowLengths:
    """Return the lengths of all rows of a batch.

    Args:
        batch: The batch; without `tree_order_B` no row shares anything.
        share: False to treat every row as a tree of its own, in the order of the batch.
    """
    prompts = np.array([len(prompt) for prompt in batch.prompt_ids], dtype=np.int64)
    length_B = prompts + batch.length_B.numpy()
    if not share or batch.tree_order_B is None or batch.shared_length_B is None:
        return RowLengths(
            row_R=np.arange(batch.num_rows),
            length_R=length_B,
            shared_length_R=np.zeros_like(length_B),
        )
    row_R = batch.tree_order_B.numpy()
    return RowLengths(
        row_R=row_R, length_R=length_B[row_R], shared_length_R=batch.shared_length_B.numpy()
    )


def order_rows(ids: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Sort rows into depth-first order, the branches of a fork by the ids of their first tokens.

    Args:
        ids: Ids of the tokens of each row, which identify a token in the forest: two ids are equal
            only if they stand for the same token.

    Returns:
        The row numbers in depth-first order, and the number of leading tokens that each row shares
        with the row before it.
    """
    order = sorted(range(len(ids)), key=lambda row: ids[row])
    arrays = [np.asarray(ids[row], dtype=np.int64) for row in order]
    shared = [common_length(*pair) for pair in pairwise(arrays)]
    return order, [0, *shared][: len(order)]


def common_length(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the longest common prefix of two 1-d arrays."""
    size = min(len(left), len(right))
    mismatches = np.flatnonzero(left[:size] != right[:size])
    return int(mismatches[0]) if len(mismatches) else size


def shared_between(shared_R: np.ndarray, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return how many leading tokens each selected row shares with the selected row before it.

    Args:
        shared_R: [R] int64 number of leading tokens that each row shares with the row before it.
        indices: Ascending indices of the K selected rows.

    Returns:
        [K] int64: the minimum of `shared_R` from the row after the previous selected one to the
        selected one; 0 for the first.
    """
    index_K = np.asarray(indices, dtype=np.int64)
    shared_K = np.zeros(len(index_K), dtype=np.int64)
    if len(index_K) > 1:
        shared_K[1:] = np.minimum.reduceat(shared_R[: index_K[-1] + 1], index_K[:-1] + 1)
    return shared_K

"""Rows of a batch without padding, in numpy arrays: the form in which ranks receive them.

Rows stand one after another in depth-first order of their trees (`batch.tree_order`), and a token
that rows share is stored once. An image that rows share is one object, which is pickled once. numpy
arrays come out of Ray's object store without a copy, so that all ranks on a machine read the same
memory.

Shape suffixes: R rows, R1 = R + 1 offsets of the rows and of the end, N stored tokens, M response
tokens of all rows, where a shared token counts once for each row; B rows and T response positions
of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.algo.advantage import group_index_and_size, group_sum
from mega_agentrl.batch.tree_order import RowLengths, row_lengths, shared_between
from mega_agentrl.errors import InputError
from mega_agentrl.types.routes import TokenRoutes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.images import PlacedImage


RowImages = tuple[tuple["PlacedImage", ...], ...]
"""The images of each row; starts count its tokens, prompt and response."""

POLICY_TARGETS = ("old_logp", "advantage", "ref_logp", "importance_weight")
"""Fields of `TrainBatch` that an update of the policy reads, without the suffix `_BT`."""
CRITIC_TARGETS = ("value", "return")
"""Fields of `TrainBatch` that an update of the critic reads, without the suffix `_BT`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedRows(RowLengths):
    """Token ids of some rows of a batch in depth-first order; a shared token is stored once."""

    prompt_length_R: np.ndarray
    """[R] int64 number of prompt tokens of each row."""
    token_N: np.ndarray
    """[N] int32 token ids: of each row those that follow the tokens shared with the row before."""
    num_positions: int
    """T, the response positions of the whole batch, to which the rows of a micro-batch are
    padded."""
    images_R: RowImages | None = None
    """Images of each row with their pixels; None if no row has any."""
    routes: TokenRoutes | None = None
    """Routes of the N stored tokens; None if no row has any."""

    def __post_init__(self) -> None:
        sizes = {len(self.row_R), len(self.length_R), len(self.prompt_length_R)}
        sizes |= set() if self.images_R is None else {len(self.images_R)}
        num_stored = int((self.length_R - self.shared_length_R).sum())
        num_routes = num_stored if self.routes is None else self.routes.num_tokens
        if len(sizes) > 1 or {len(self.token_N), num_routes} != {num_stored}:
            numbers = {
                "row_R": len(self.row_R),
                "length_R": len(self.length_R),
                "prompt_length_R": len(self.prompt_length_R),
                "images_R": None if self.images_R is None else len(self.images_R),
                "token_N": len(self.token_N),
                "routes": num_routes,
            }
            expected = (
                "equal numbers of all but the last two, or no images, and "
                f"{num_stored} tokens and routes, the sum of length_R - shared_length_R"
            )
            raise InputError("PackedRows, lengths", numbers, expected)

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[np.ndarray],
        *,
        row_R: np.ndarray,
        prompt_lengths: Sequence[int] | np.ndarray,
        num_positions: int,
        shared_length_R: np.ndarray | None = None,
        images_R: Sequence[tuple[PlacedImage, ...]] | None = None,
        routes_R: Sequence[TokenRoutes | None] | None = None,
    ) -> PackedRows:
        """Pack rows that are given as whole token sequences.

        Args:
            sequences: Int32 token ids of each row, prompt and response, in depth-first order.
            row_R: [R] int64 number of each row in the whole batch.
            prompt_lengths: Number of prompt tokens of each row.
            num_positions: T, the response positions of the whole batch.
            shared_length_R: [R] int64 number of leading tokens that each row shares with the row
                before it; None if the rows share nothing.
            images_R: R tuples of the images of each row; None if no row has any.
            routes_R: Routes of the first tokens of each row; None if no row has any.
        """
        length_R = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        if shared_length_R is None:
            shared_length_R = np.zeros_like(length_R)
        stored = [tokens[size:] for tokens, size in zip(sequences, shared_length_R, strict=True)]
        return cls(
            row_R=row_R,
            length_R=length_R,
            shared_length_R=shared_length_R,
            prompt_length_R=np.array(prompt_lengths, dtype=np.int64),
            token_N=np.concatenate(stored) if stored else np.zeros(0, dtype=np.int32),
            num_positions=num_positions,
            images_R=tuple(images_R) if images_R is not None and any(images_R) else None,
            routes=_stored_routes(routes_R or (), length_R.tolist(), shared_length_R.tolist()),
        )

    @classmethod
    def from_batch(cls, batch: TrainBatch, *, share: bool = True) -> PackedRows:
        """Pack all rows of a batch; `share` as in `row_lengths`.

        Raises:
            ValueError: A row has no prompt, because nothing predicts its first token.
        """
        for row, prompt in enumerate(batch.prompt_ids):
            if not prompt:
                raise InputError(f"prompt_ids, row {row}", prompt, "at least 1 token")
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
            images_R=_select(batch.images_B, lengths.row_R),
            routes_R=_select(batch.routes_B, lengths.row_R),
        )

    @classmethod
    def merge(
        cls, parts: Sequence[PackedRows], row_R: np.ndarray, shared_length_R: np.ndarray
    ) -> PackedRows:
        """Return selected rows of several parts of one batch.

        Args:
            parts: Parts that together hold the selected rows.
            row_R: [R] int64 numbers of the selected rows in the batch, in depth-first order.
            shared_length_R: [R] int64 number of leading tokens that each selected row shares with
                the one before it.
        """
        row_by_number = {
            int(row): (tokens_S, length, images, routes)
            for part in parts
            for row, tokens_S, length, images, routes in zip(
                part.row_R,
                part.sequences(range(part.num_rows)),
                part.prompt_length_R,
                part.images_R or ((),) * part.num_rows,
                part.row_routes(range(part.num_rows)),
                strict=True,
            )
        }
        return cls.from_sequences(
            [row_by_number[int(row)][0] for row in row_R],
            row_R=row_R,
            prompt_lengths=[row_by_number[int(row)][1] for row in row_R],
            num_positions=parts[0].num_positions,
            shared_length_R=shared_length_R,
            images_R=[row_by_number[int(row)][2] for row in row_R],
            routes_R=[row_by_number[int(row)][3] for row in row_R],
        )

    @property
    def response_length_R(self) -> np.ndarray:
        """[R] int64 number of response tokens of each row."""
        lengths_R: np.ndarray = self.length_R - self.prompt_length_R
        return lengths_R

    @property
    def response_start_R1(self) -> np.ndarray:
        """[R + 1] int64 offset of each row's first response token in [M]; the last entry is M."""
        return _offsets(self.response_length_R.tolist())

    def sequences(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the int32 token ids, prompt and response, of the rows at ascending indices."""
        return [self.token_N[stored_S] for stored_S in self.stored_indices(indices)]

    def row_routes(self, indices: Sequence[int] | np.ndarray) -> list[TokenRoutes | None]:
        """Return the routes of all tokens of the rows at ascending indices."""
        if self.routes is None:
            return [None] * len(indices)
        return [self.routes.take(stored_S) for stored_S in self.stored_indices(indices)]

    def stored_indices(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the index among the stored tokens of each token of the rows at these indices."""
        selected = {int(index) for index in indices}
        start_R1 = _offsets((self.length_R - self.shared_length_R).tolist())
        # In depth-first order a row replaces only the tokens after the prefix that it shares.
        path = np.zeros(self.length_R.max(initial=0), dtype=np.int64)
        paths = []
        for index in range(max(selected, default=-1) + 1):
            shared, length = self.shared_length_R[index], self.length_R[index]
            path[shared:length] = np.arange(start_R1[index], start_R1[index + 1])
            if index in selected:
                paths.append(path[:length].copy())
        return paths

    def take(self, indices: Sequence[int] | np.ndarray) -> PackedRows:
        """Return the rows at these ascending indices."""
        index_R = np.array(indices, dtype=np.int64)
        return self.from_sequences(
            self.sequences(index_R),
            row_R=self.row_R[index_R],
            prompt_lengths=self.prompt_length_R[index_R],
            num_positions=self.num_positions,
            shared_length_R=shared_between(self.shared_length_R, index_R),
            images_R=_select(self.images_R, index_R),
            routes_R=self.row_routes(index_R),
        )

    def with_token_appended(self) -> PackedRows:
        """Return the rows, each with one more response token, whose id is 0."""
        return self.from_sequences(
            [np.append(tokens_S, np.int32(0)) for tokens_S in self.sequences(range(self.num_rows))],
            row_R=self.row_R,
            prompt_lengths=self.prompt_length_R,
            num_positions=self.num_positions + 1,
            shared_length_R=self.shared_length_R,
            images_R=self.images_R,
            routes_R=self.row_routes(range(self.num_rows)),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedTargets:
    """Mask, log-probs, advantages and the like that an update reads for the tokens of some rows.

    The fields that end in `_M` are [M] copies of the [B, T] fields of `TrainBatch`; they are None
    if the batch has no such field or the update does not read it.
    """

    start_R1: np.ndarray
    """[R + 1] int64 offset of each row's first response token in [M]; the last entry is M."""
    num_positions: int
    """T, to which the rows of a micro-batch are padded."""
    mask_M: np.ndarray
    """[M] bool, True for tokens that the policy sampled and that may be trained on."""
    old_logp_M: np.ndarray | None = None
    """[M] float32 log-probs of the policy before the update."""
    advantage_M: np.ndarray | None = None
    """[M] float32 advantages."""
    ref_logp_M: np.ndarray | None = None
    """[M] float32 log-probs of the reference policy."""
    importance_weight_M: np.ndarray | None = None
    """[M] float32 weight of each token's policy loss; None means a weight of 1."""
    value_M: np.ndarray | None = None
    """[M] float32 values from the critic."""
    return_M: np.ndarray | None = None
    """[M] float32 returns, the critic's targets."""
    kl_weight_M: np.ndarray | None = None
    """[M] weight of each token's KL term; None for `algo.kl_coef` everywhere."""
    num_tokens_R: np.ndarray | None = None
    """[R] int64 number of trained tokens of each row's whole trajectory; None if each row is one.
    """

    @classmethod
    def from_batch(
        cls,
        batch: TrainBatch,
        row_R: np.ndarray,
        names: Iterable[str] = (),
        kl_weight_BT: torch.Tensor | None = None,
    ) -> PackedTargets:
        """Pack the mask and other fields of some rows of a batch.

        Args:
            batch: The whole batch.
            row_R: [R] int64 numbers of the rows to pack.
            names: Further fields to pack, without the suffix `_BT`, such as `POLICY_TARGETS`.
            kl_weight_BT: [B, T] weight of each token's KL term; None for `algo.kl_coef`.
        """
        by_name = {"mask": batch.mask_BT, "kl_weight": kl_weight_BT}
        by_name |= {name: getattr(batch, f"{name}_BT") for name in names}
        length_R = batch.length_B[torch.from_numpy(row_R)]
        num_tokens_B = None
        if batch.trajectory_B is not None:
            index_B, _ = group_index_and_size(batch.trajectory_B)
            num_tokens_B = group_sum(batch.mask_BT.sum(1), index_B).numpy()
        return cls(
            start_R1=_offsets(length_R.tolist()),
            num_positions=batch.response_BT.size(1),
            num_tokens_R=None if num_tokens_B is None else num_tokens_B[row_R],
            **{
                f"{name}_M": pack_values(value_BT, row_R, length_R)
                for name, value_BT in by_name.items()
                if value_BT is not None
            },
        )

    def num_tokens(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Return `num_tokens_R` of the rows at these indices, [R], or None if it is None."""
        if self.num_tokens_R is None:
            return None
        return torch.from_numpy(self.num_tokens_R[list(indices)])

    def padded(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Return the field `name`, such as `old_logp`, of the rows at these indices, `[R, T]`.

        Positions after the end of a row are 0.
        """
        value_M: np.ndarray = getattr(self, f"{name}_M")
        padded_RT = np.zeros((len(indices), self.num_positions), dtype=value_M.dtype)
        for value_T, index in zip(padded_RT, indices, strict=True):
            start, stop = self.start_R1[index], self.start_R1[index + 1]
            value_T[: stop - start] = value_M[start:stop]
        return torch.from_numpy(padded_RT)


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedScores:
    """Outputs of a forward pass over some rows, such as log-probs and entropies."""

    row_R: np.ndarray
    """[R] int64 number of each row in the whole batch."""
    values: tuple[np.ndarray, ...]
    """One float32 array for each output: [M] values of response tokens, or [R] values of rows, in
    the order of `row_R`."""


def check_placeholders(batch: TrainBatch, placeholder_id: int) -> None:
    """Check that each row has an image for each of its placeholder tokens.

    Raises:
        ValueError: A row has other images than placeholders, so that the policy would read
            something else there than the engine.
    """
    inside_BT = torch.arange(batch.response_BT.size(1))[None, :] < batch.length_B[:, None]
    in_response_B = ((batch.response_BT == placeholder_id) & inside_BT).sum(dim=1).tolist()
    images_B = batch.images_B or ((),) * batch.num_rows
    for row, (prompt, images) in enumerate(zip(batch.prompt_ids, images_B, strict=True)):
        num_placeholders = prompt.count(placeholder_id) + in_response_B[row]
        num_features = sum(placed.image.num_tokens for placed in images)
        if num_placeholders != num_features:
            name = f"number of tokens {placeholder_id}, the placeholder of images, in row {row}"
            expected = f"{num_features}, one for each feature of its {len(images)} images"
            cause = "a trajectory whose images were dropped"
            raise InputError(name, num_placeholders, expected, cause)


def pack_values(value_BT: torch.Tensor, row_R: np.ndarray, length_R: torch.Tensor) -> np.ndarray:
    """Return the [B, T] values of the rows `row_R` without their padding, one row after another.

    Args:
        value_BT: [B, T] values of the whole batch.
        row_R: [R] int64 numbers of the rows.
        length_R: [R] int64 response lengths of the rows.

    Returns:
        [M] in the dtype of `value_BT`.
    """
    inside_RT = torch.arange(value_BT.size(1))[None, :] < length_R[:, None]
    values_M: np.ndarray = value_BT[torch.from_numpy(row_R)][inside_RT].numpy()
    return values_M


def unpack_scores(
    answers: Sequence[PackedScores | None],
    length_B: torch.Tensor,
    num_positions: int,
    is_scored_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a forward pass for the whole batch.

    They are 0 after the end of a row, and in rows that no rank returns.

    Args:
        answers: Outputs of each rank; None from ranks that return none, such as those of other
            pipeline stages than the last.
        length_B: [B] int64 response lengths.
        num_positions: T, the response positions of the batch.
        is_scored_B: [B] bool, the rows that the ranks must return; None for all.

    Returns:
        One [B, T] float32 tensor for each output.
    """
    parts = [part for part in answers if part is not None]
    numbers = sorted(int(row) for part in parts for row in part.row_R)
    asked = torch.ones_like(length_B) if is_scored_B is None else is_scored_B
    missing = set(asked.nonzero().flatten().tolist()) - set(numbers)
    assert not missing and len(numbers) == len(set(numbers)), "the ranks must return each row once"
    outputs = tuple(torch.zeros(len(length_B), num_positions) for _ in parts[0].values)
    for part in parts:
        index_R = torch.from_numpy(part.row_R.copy())
        inside_RT = torch.arange(num_positions)[None, :] < length_B[index_R, None]
        for output_BT, value_M in zip(outputs, part.values, strict=True):
            padded_RT = torch.zeros(inside_RT.shape)
            padded_RT[inside_RT] = torch.tensor(value_M)
            output_BT[index_R] = padded_RT
    return outputs


def _stored_routes(
    routes_R: Sequence[TokenRoutes | None], lengths: Sequence[int], shared: Sequence[int]
) -> TokenRoutes | None:
    """Return the routes of the tokens that are stored of each row; None if no row has any."""
    some = next((routes for routes in routes_R if routes is not None), None)
    if some is None:
        return None
    num_stored = sum(lengths) - sum(shared)
    expert_NLK = some.before(0).resized(num_stored).expert_NLK
    digest_N = np.zeros(num_stored, dtype=np.uint32)
    path, start = np.zeros(max(lengths), dtype=np.int64), 0
    for routes, length, num_shared in zip(routes_R, lengths, shared, strict=True):
        stop = start + length - num_shared
        path[num_shared:length] = np.arange(start, stop)
        start = stop
        if routes is not None:
            # The last token of a rollout has routes only in rows that go on after it.
            size = min(length, routes.num_tokens)
            new_S = np.flatnonzero((digest_N[path[:size]] == 0) & (routes.digest_N[:size] > 0))
            expert_NLK[path[new_S]] = routes.expert_NLK[new_S]
            digest_N[path[new_S]] = routes.digest_N[new_S]
    return TokenRoutes(expert_NLK=expert_NLK, digest_N=digest_N)


def _select[T](values: Sequence[T] | None, row_R: np.ndarray) -> tuple[T, ...] | None:
    return None if values is None else tuple(values[row] for row in row_R.tolist())


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum(np.fromiter(chain((0,), lengths), dtype=np.int64))

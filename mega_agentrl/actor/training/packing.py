"""Packing of the rows of a data rank into micro-batches, in which each token is computed once.

A micro-batch holds the rows of one or more rollout trees in depth-first order. The tokens that a
row shares with the row before it (`batch.tree_order`) are not repeated, so that a micro-batch holds
each token of the trees once. The rest of the row is a branch, whose tokens follow the shared path.
The position of a token is its depth, which is also its position in every row that contains it.

The input of a row is prompt + response without its last token, which has no successor to predict.
Response token t of a row with P prompt tokens is predicted at position P + t - 1 of the row. A
token that rows share is predicted once, at its parent; at a fork one hidden state predicts the
first token of every branch.

Losses, corrections and metrics are computed on rows: `MicroBatch.to_rows` copies the value of a
token to all of its rows, and the backward pass of the copy adds up their gradients. These are the
sums of advantages and weights over the paths of a token that tree training needs (arXiv 2511.00413,
section 3), whatever the loss is, so that loss and gradient are those of flat rows.

The images of the rows are listed once for each micro-batch, however many of its rows show them, and
each context rank lists those whose placeholders it holds. The features of an image are the rows of
a matrix in the order of its placeholders, and those of several images follow one another.

Padding is added only where the parallel layout requires it: at the end of each tree for context
parallelism, which splits every tree into equal chunks (`parallel.context_parallel`), and as one
more tree at the end for sequence parallelism, which splits the rank's tokens evenly. No real
token attends to padding, and nothing is predicted there.

Shape suffixes: S packed tokens of this rank, W of all context ranks, G trees, N predicted tokens of
this rank, K pairs of a predicted token and a row that contains it, R rows of the micro-batch, T
response positions of the batch, M response tokens of all rows of the data rank, P placeholders of
images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.actor.device import from_host
from mega_agentrl.actor.model.attention_plan import Branch
from mega_agentrl.actor.model.route_replay import RouteLog
from mega_agentrl.actor.parallel.context_parallel import rank_token_indices, tree_length_multiple
from mega_agentrl.batch.tree_order import shared_between
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import round_up
from mega_agentrl.types.routes import token_keys, unrouted
from mega_agentrl.vision.positions import rotary_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.batch.packed_rows import PackedRows
    from mega_agentrl.types.images import ImageInput, PlacedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchImages:
    """Images of a micro-batch and the placeholders that take their features."""

    images: tuple[ImageInput, ...]
    """The distinct images, with their pixels."""
    place_P: torch.Tensor
    """`[P]` int64 index of each placeholder in the tokens, ascending."""
    feature_P: torch.Tensor
    """`[P]` int64 index of its feature among those of all images."""

    def within(self, start: int, stop: int) -> MicroBatchImages | None:
        """Return the placeholders among the tokens [start, stop), counted from `start`.

        Images without such a placeholder are left out; the result is None if none remains.
        """
        inside_P = (self.place_P >= start) & (self.place_P < stop)
        first_I1 = np.cumsum([0, *(image.num_tokens for image in self.images)])
        feature_P = self.feature_P[inside_P].cpu().numpy()
        image_P = np.searchsorted(first_I1, feature_P, side="right") - 1
        kept_I = np.unique(image_P)
        if not len(kept_I):
            return None
        images = tuple(self.images[index] for index in kept_I)
        new_first_I = np.zeros(len(self.images), dtype=np.int64)
        new_first_I[kept_I] = np.cumsum([0, *(image.num_tokens for image in images)])[:-1]
        feature_P = feature_P - first_I1[image_P] + new_first_I[image_P]
        device = self.place_P.device
        return MicroBatchImages(
            images=images,
            place_P=self.place_P[inside_P] - start,
            feature_P=torch.from_numpy(feature_P).to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass, as held by one context rank."""

    rows: tuple[int, ...]
    """Indices in the rows of the data rank, ascending; empty for a micro-batch of padding only."""
    token_S: torch.Tensor
    """`[S]` int64 token ids."""
    position_S: torch.Tensor
    """`[S]` int64 position of each token on its path."""
    start_G: tuple[int, ...]
    """First of the W packed tokens of each tree and of the padding, if any, followed by W; equal on
    all context ranks."""
    branches: tuple[Branch, ...]
    """The branches of all trees, in order; they cover the W packed tokens."""
    predict_N: torch.Tensor
    """`[N]` index in `token_S` of the parent of each evaluated token, which predicts it; never
    descending."""
    target_N: torch.Tensor
    """`[N]` the evaluated tokens."""
    predicted_K: torch.Tensor
    """`[K]` index in `target_N` of the evaluated token of each pair."""
    row_K: torch.Tensor
    """`[K]` index in `rows` of the row of each pair."""
    column_K: torch.Tensor
    """`[K]` response position of the token in that row."""
    predicted_of_ranks: tuple[int, ...]
    """Number of evaluated tokens whose parents each tensor rank holds under sequence parallelism,
    in order; one number without it."""
    context_rank: int = 0
    """The context rank that holds these tokens; each token is held by one rank."""
    context_size: int = 1
    rotary_position_3S: torch.Tensor | None = None
    """`[3, S]` int64 position of each token along time, height and width
    (`vision.positions.rotary_positions`); None for a text model."""
    images: MicroBatchImages | None = None
    """The images whose placeholders this context rank holds; None if it holds none."""
    route_log: RouteLog | None = None
    """Routes of the tokens, to be replayed or recorded; None if each layer uses its own."""

    def predicted_mask(self, num_positions: int) -> torch.Tensor:
        """Return `[R, T]` bool, the evaluated tokens that this context rank predicts."""
        return self.to_rows(torch.ones_like(self.target_N, dtype=torch.bool), num_positions)

    def to_rows(self, value_N: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Copy `[N]` values to `[R, T]` with gradients, 0 where nothing was evaluated."""
        out_RT = value_N.new_zeros(len(self.rows), num_positions)
        return out_RT.index_put((self.row_K, self.column_K), value_N[self.predicted_K])


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedInputs:
    """The inputs of the rows of a micro-batch, packed as trees, for all context ranks."""

    token_W: np.ndarray
    """`[W]` int64 token ids, 0 in the padding."""
    position_W: np.ndarray
    """`[W]` int64 position of each token on its path."""
    rotary_position_3W: np.ndarray | None
    """`[3, W]` int64 position of each token along time, height and width; None for a text model."""
    start_G: tuple[int, ...]
    branches: tuple[Branch, ...]
    packed_index_R: tuple[np.ndarray, ...]
    """For each row, the index among the W packed tokens of each token of its input."""
    row_W: np.ndarray
    """`[W]` int64 index among the packed rows of the first one that contains each token; -1 in the
    padding."""


def pack_rows(
    rows: PackedRows,
    indices: Sequence[int],
    select_M: np.ndarray,
    device: torch.device,
    *,
    multiple: int = 1,
    context_rank: int = 0,
    context_size: int = 1,
    has_images: bool = False,
    is_recording: bool = False,
) -> MicroBatch:
    """Pack rows of a data rank for one context rank.

    Args:
        rows: The rows of the data rank.
        indices: Ascending indices of the rows to pack; without any, the micro-batch is padding
            only.
        select_M: `[M]` bool, which response tokens of all of `rows` to evaluate.
        device: Device of the tensors.
        multiple: Number of tensor ranks that split the tokens; S is padded to a multiple of it.
        context_rank: The rank whose tokens are returned.
        context_size: Number of context ranks.
        has_images: Whether the model sees images, so that its tokens have three positions.
        is_recording: Whether to record the routes of the tokens.

    Raises:
        ValueError: For images of a model without a vision tower, and for an image that is placed at
            other tokens than placeholders.
    """
    sequences = rows.sequences(indices)
    images = [rows.images_R[index] if rows.images_R else () for index in indices]
    _check_places(indices, sequences, images, has_images=has_images)
    inputs = _pack_inputs(
        rows, indices, sequences, multiple, context_size, images if has_images else None
    )
    packed_index_S = rank_token_indices(inputs.start_G, context_rank, context_size).numpy()
    row_K, column_K = selected_tokens(rows, indices, select_M)
    position_K = rows.prompt_length_R[list(indices)][row_K] + column_K
    owners = _owning_rows(
        shared_between(rows.shared_length_R, indices), [len(tokens_S) for tokens_S in sequences]
    )
    owner_K = _take_at(owners, row_K, position_K)
    local_index_W = np.full(len(inputs.token_W), -1)
    local_index_W[packed_index_S] = np.arange(len(packed_index_S))
    parent_K = local_index_W[_take_at(inputs.packed_index_R, owner_K, position_K - 1)]
    row_K, column_K, owner_K, position_K, parent_K = (
        values_K[parent_K >= 0] for values_K in (row_K, column_K, owner_K, position_K, parent_K)
    )
    # A target is identified by its parent, and by its owner, the first row that contains it.
    _, first_N, predicted_K = np.unique(
        parent_K * len(sequences) + owner_K, return_index=True, return_inverse=True
    )
    predict_N = parent_K[first_N]
    rank_N = predict_N // (len(packed_index_S) // multiple)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return from_host(torch.from_numpy(values.astype(np.int64)), device)

    rotary_3W = inputs.rotary_position_3W
    return MicroBatch(
        rows=tuple(indices),
        token_S=tensor(inputs.token_W[packed_index_S]),
        position_S=tensor(inputs.position_W[packed_index_S]),
        start_G=inputs.start_G,
        branches=inputs.branches,
        predict_N=tensor(predict_N),
        target_N=tensor(_take_at(sequences, owner_K[first_N], position_K[first_N])),
        predicted_K=tensor(predicted_K),
        row_K=tensor(row_K),
        column_K=tensor(column_K),
        predicted_of_ranks=tuple(np.bincount(rank_N, minlength=multiple).tolist()),
        context_rank=context_rank,
        context_size=context_size,
        rotary_position_3S=None if rotary_3W is None else tensor(rotary_3W[:, packed_index_S]),
        images=_place_images(images, inputs.packed_index_R, local_index_W, device),
        route_log=_make_route_log(
            rows, indices, inputs, packed_index_S, device, is_recording=is_recording
        ),
    )


def _check_places(
    indices: Sequence[int],
    sequences: Sequence[np.ndarray],
    images_R: Sequence[Sequence[PlacedImage]],
    *,
    has_images: bool,
) -> None:
    """Check that all images are placed at tokens with the same id, that of the placeholder."""
    ids: set[int] = set()
    for index, tokens_S, placed in zip(indices, sequences, images_R, strict=True):
        for part in placed:
            if not has_images:
                raise InputError(
                    f"image of row {index}",
                    part.image.image_id,
                    "none for a text model",
                    "data with images in a run without a vision-language model",
                )
            found = set(tokens_S[part.start : part.stop].tolist())
            ids |= found
            if len(ids) != 1 or part.stop > len(tokens_S):
                raise InputError(
                    f"row {index}: ids at the tokens {part.start}..{part.stop - 1} of "
                    f"{len(tokens_S)}, the place of image {part.image.image_id}",
                    sorted(found),
                    "placeholders, which have the same id in all rows",
                    "a start that counts the tokens of another sequence",
                )


def _make_route_log(
    rows: PackedRows,
    indices: Sequence[int],
    inputs: _PackedInputs,
    packed_index_S: np.ndarray,
    device: torch.device,
    *,
    is_recording: bool,
) -> RouteLog | None:
    """Return the routes of the packed tokens at `packed_index_S`; None without any to replay."""
    if rows.routes is None and not is_recording:
        return None
    row_S, position_S = inputs.row_W[packed_index_S], inputs.position_W[packed_index_S]
    number_S = np.append(rows.row_R[list(indices)], -1)[row_S]
    expert_SLK, expected_digest = None, 0
    if rows.routes is not None:
        routes = rows.routes
        nothing = routes.before(0).resized(1)
        target_SLK = np.repeat(nothing.expert_NLK, len(row_S), axis=0)
        for number, stored_N in enumerate(rows.stored_indices(indices)):
            is_row_S = row_S == number
            index_N = stored_N[position_S[is_row_S]]
            target_SLK[is_row_S] = routes.expert_NLK[index_N]
            expected_digest += int(routes.digest_N[index_N].sum(dtype=np.int64))
        is_known_S = (target_SLK != unrouted(target_SLK.dtype)).all(axis=(1, 2))
        expert_SLK = np.where(is_known_S[:, None, None], target_SLK.astype(np.int16), -1)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return from_host(torch.from_numpy(values), device)

    key_S = token_keys(position_S.astype(np.int64), inputs.token_W[packed_index_S].astype(np.int64))
    return RouteLog(
        key_S=tensor(key_S),
        row_S=number_S.astype(np.int64),
        position_S=position_S.astype(np.int64),
        expert_SLK=None if expert_SLK is None else tensor(expert_SLK.astype(np.int16)),
        expected_digest=expected_digest,
        is_recording=is_recording,
    )


def _place_images(
    images_R: Sequence[Sequence[PlacedImage]],
    packed_index_R: Sequence[np.ndarray],
    local_index_W: np.ndarray,
    device: torch.device,
) -> MicroBatchImages | None:
    """Return the images whose placeholders this context rank holds.

    Args:
        images_R: Images of each row.
        packed_index_R: Index among the packed tokens of each token of each row's input.
        local_index_W: Index among this rank's tokens of each packed token, -1 for other ranks'.
        device: Device of the tensors.
    """
    first_feature: dict[str, int] = {}
    images: list[ImageInput] = []
    places, features = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    num_features = 0
    for placed, packed_index in zip(images_R, packed_index_R, strict=True):
        for part in placed:
            local_P = local_index_W[packed_index[part.start : part.stop]]
            held_P = np.flatnonzero(local_P >= 0)
            if not len(held_P):
                continue
            first = first_feature.setdefault(part.image.image_id, num_features)
            if first == num_features:
                images.append(part.image)
                num_features += part.image.num_tokens
            places.append(local_P[held_P])
            features.append(first + held_P)
    if not images:
        return None
    # Rows that share an image name the same places.
    place_P, first_P = np.unique(np.concatenate(places), return_index=True)
    return MicroBatchImages(
        images=tuple(images),
        place_P=from_host(torch.from_numpy(place_P), device),
        feature_P=from_host(torch.from_numpy(np.concatenate(features)[first_P]), device),
    )


def selected_tokens(
    rows: PackedRows, indices: Sequence[int], select_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `row_K` and `column_K` of the selected response tokens of the packed rows."""
    start_R1 = rows.response_start_R1
    columns = [np.flatnonzero(select_M[start_R1[index] : start_R1[index + 1]]) for index in indices]
    counts_R = np.array([len(column_T) for column_T in columns], dtype=np.int64)
    row_K = np.repeat(np.arange(len(columns)), counts_R)
    return row_K, np.concatenate([*columns, np.zeros(0, dtype=np.int64)])


def _pack_inputs(
    rows: PackedRows,
    indices: Sequence[int],
    sequences: Sequence[np.ndarray],
    multiple: int,
    context_size: int,
    images_R: Sequence[Sequence[PlacedImage]] | None,
) -> _PackedInputs:
    """Pack the inputs of rows, whose prompts and responses are `sequences`, and pad the trees."""
    length_R = rows.input_length_R[list(indices)]
    shared_R = shared_between(rows.shared_input_length_R, indices)
    tree_multiple = tree_length_multiple(context_size)
    tokens, positions, packed_index, branches, row_index = [], [], [], [], []
    rotary: list[np.ndarray] = []
    start_G, num_packed = [], 0
    # Indices and runs of the packed tokens of the current row.
    path_index = np.zeros(0, dtype=np.int64)
    runs: list[tuple[int, int]] = []
    for number, (sequence, length, num_shared) in enumerate(
        zip(sequences, length_R.tolist(), shared_R.tolist(), strict=True)
    ):
        if not num_shared:
            start_G.append(num_packed)
        is_last = number + 1 == len(sequences) or not shared_R[number + 1]
        num_tree_tokens = num_packed + length - num_shared - start_G[-1]
        num_padding = round_up(num_tree_tokens, tree_multiple) - num_tree_tokens if is_last else 0
        stop = num_packed + length - num_shared + num_padding
        runs = list(_first_tokens(runs, num_shared))
        branches.append(Branch(start=num_packed, stop=stop, path=tuple(runs)))
        runs.append((num_packed, stop))
        tokens += [sequence[num_shared:length], np.zeros(num_padding, dtype=np.int64)]
        positions.append(np.arange(num_shared, length + num_padding))
        row_index += [np.full(length - num_shared, number), np.full(num_padding, -1)]
        if images_R is not None:
            rotary_3L = rotary_positions(length + num_padding, images_R[number])
            rotary.append(rotary_3L[:, num_shared:])
        path_index = np.concatenate(
            [path_index[:num_shared], np.arange(num_packed, stop - num_padding)]
        )
        packed_index.append(path_index)
        num_packed = stop
    # W must be a multiple of `tree_multiple`, and S = W / C of `multiple`.
    packed_multiple = math.lcm(tree_multiple, multiple * context_size)
    num_missing = -num_packed % packed_multiple if sequences else packed_multiple
    if num_missing:
        start_G.append(num_packed)
        branches.append(Branch(start=num_packed, stop=num_packed + num_missing, path=()))
        tokens.append(np.zeros(num_missing, dtype=np.int64))
        positions.append(np.arange(num_missing))
        row_index.append(np.full(num_missing, -1))
        rotary.append(rotary_positions(num_missing, ()))
    return _PackedInputs(
        token_W=np.concatenate(tokens),
        position_W=np.concatenate(positions),
        rotary_position_3W=None if images_R is None else np.concatenate(rotary, axis=1),
        start_G=(*start_G, num_packed + num_missing),
        branches=tuple(branches),
        packed_index_R=tuple(packed_index),
        row_W=np.concatenate(row_index),
    )


def _first_tokens(runs: Sequence[tuple[int, int]], num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the part of the runs (start, stop) that holds their first `num_tokens` tokens."""
    for start, stop in runs:
        if num_tokens > 0:
            yield start, min(stop, start + num_tokens)
        num_tokens -= stop - start


def _owning_rows(shared_R: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return for each position of each row the first row that contains the token there.

    Args:
        shared_R: `[R]` number of leading tokens that each row shares with the one before it.
        lengths: Number of tokens of each row.
    """
    owners = [np.zeros(0, dtype=np.int64)]
    for row, (num_shared, length) in enumerate(zip(shared_R.tolist(), lengths, strict=True)):
        owners.append(np.concatenate([owners[-1][:num_shared], np.full(length - num_shared, row)]))
    return owners[1:]


def _take_at(arrays: Sequence[np.ndarray], row_K: np.ndarray, position_K: np.ndarray) -> np.ndarray:
    """Return `[K]`, from the array of each row the element at a position."""
    start_R = np.array([0, *accumulate(map(len, arrays))], dtype=np.int64)
    values = np.concatenate([*arrays, np.zeros(0, dtype=np.int64)])
    value_K: np.ndarray = values[start_R[row_K] + position_K]
    return value_K

"""Packs rollout trees into one training batch: rows in tree order, right-padded to the longest.

Every trajectory becomes a row; the mask of a failed trajectory is all zero. A trajectory whose
context was reset (`Trajectory.context_resets`) becomes one row per part, each with the context it
was sampled in as its prompt; `trajectory_B` then holds the trajectory of each row. `group_B`
numbers the prompts from 0. A failed trajectory gets a group of its own after those of the prompts,
so that its missing reward stays out of its prompt's mean. A pending reward is NaN until
`fill_rewards`, so that it cannot be used by mistake. `tree_token_BT` numbers the tokens of all
trees: a fork shares the ids of its parent's first `fork_len` tokens, and the padding is -1.
`tree_order_B` and `shared_length_B` describe which leading tokens rows share: the prompt, the
response up to a fork, and the tokens that a reset context keeps of the sequence before it.
`images_B` places the images of prompts, responses and reset contexts in the rows, and `routes_B`
has the routes of their tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.batch.tree_order import common_length, order_rows
from mega_agentrl.errors import InputError
from mega_agentrl.types.batch import TrainBatch
from mega_agentrl.types.routes import join_routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.records import ContextReset, Prompt, RolloutTree, Trajectory
    from mega_agentrl.types.routes import TokenRoutes

PAD_TREE_TOKEN = -1
_ContextKey = tuple[int, tuple[int, ...], tuple[str, ...]]
"""Last token before a context reset, tokens of the new context, and ids of its images."""


def pack_trees(trees: Sequence[RolloutTree]) -> TrainBatch:
    """Return the batch of all trajectories.

    Raises:
        ValueError: there is no token to train on, a tree is inconsistent, or the pixels of an image
            were not loaded.
    """
    trajectories = _all_trajectories(trees)
    rows = [
        segment
        for index, trajectory in enumerate(trajectories)
        for segment in _row_segments(index, trajectory)
    ]
    width = max((row.stop - row.start for row in rows), default=0)
    trajectory_B = torch.tensor([row.trajectory_index for row in rows], dtype=torch.int64)
    token_ids = _tree_token_ids(trees)
    order, shared = order_rows(_row_token_ids(trees, token_ids, rows))

    def pad(values: Iterable[Sequence[float]], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        by_trajectory = list(values)
        return _pad_to_tensor(
            [by_trajectory[row.trajectory_index][row.start : row.stop] for row in rows],
            width,
            dtype,
            fill,
        )

    mask_BT = pad((trajectory.loss_mask for trajectory in trajectories), torch.bool)
    return TrainBatch(
        prompt_ids=tuple(row.context.token_ids for row in rows),
        response_BT=pad((trajectory.token_ids for trajectory in trajectories), torch.int64),
        length_B=torch.tensor([row.stop - row.start for row in rows], dtype=torch.int64),
        mask_BT=_mask_failed_rows(mask_BT, trees, trajectory_B),
        group_B=torch.tensor(_group_ids(trees), dtype=torch.int64)[trajectory_B],
        reward_B=_rewards(trajectories)[trajectory_B],
        tree_token_BT=pad(token_ids, torch.int64, PAD_TREE_TOKEN),
        rollout_logp_BT=pad((trajectory.logps for trajectory in trajectories), torch.float32),
        rollout_entropy_BT=pad(
            (trajectory.entropies for trajectory in trajectories), torch.float32
        ),
        version_BT=pad((trajectory.versions for trajectory in trajectories), torch.int64),
        trajectory_B=trajectory_B if len(rows) > len(trajectories) else None,
        tree_order_B=torch.tensor(order, dtype=torch.int64),
        shared_length_B=torch.tensor(shared, dtype=torch.int64),
        images_B=_row_images(trajectories, rows),
        routes_B=_row_routes(trajectories, rows),
    )


def fill_rewards(batch: TrainBatch, trees: Sequence[RolloutTree]) -> TrainBatch:
    """Return the batch with the rewards that were pending when these trees were packed.

    Trajectories that failed since then, because their reward could not be computed, are masked.

    Raises:
        ValueError: a trajectory has no score, or there is no token to train on.
    """
    trajectories = _all_trajectories(trees)
    for trajectory in trajectories:
        if trajectory.score is None and not trajectory.failed:
            name = f"score of trajectory {trajectory.trajectory_id}"
            raise InputError(name, None, "a score", "it was collected without a rubric")
    trajectory_B = batch.trajectory_B
    if trajectory_B is None:
        trajectory_B = torch.arange(len(trajectories))
    return batch.with_fields(
        mask_BT=_mask_failed_rows(batch.mask_BT, trees, trajectory_B),
        group_B=torch.tensor(_group_ids(trees), dtype=torch.int64)[trajectory_B],
        reward_B=_rewards(trajectories)[trajectory_B],
        baseline_B=_baseline_rewards(trees, trajectory_B),
    )


def _all_trajectories(trees: Sequence[RolloutTree]) -> list[Trajectory]:
    return [trajectory for tree in trees for trajectory in tree.trajectories]


def _baseline_rewards(
    trees: Sequence[RolloutTree], trajectory_B: torch.Tensor
) -> torch.Tensor | None:
    """Return the [B] rewards of the greedy answers to the rows' prompts; NaN where one failed."""
    if all(tree.greedy_trajectory is None for tree in trees):
        return None
    values = []
    for tree in trees:
        score = (
            None
            if tree.greedy_trajectory is None or tree.greedy_trajectory.failed
            else tree.greedy_trajectory.score
        )
        values += [math.nan if score is None else score.value] * len(tree.trajectories)
    return torch.tensor(values, dtype=torch.float32)[trajectory_B]


def _mask_failed_rows(
    mask_BT: torch.Tensor, trees: Sequence[RolloutTree], trajectory_B: torch.Tensor
) -> torch.Tensor:
    """Clear the mask in the rows of failed trajectories."""
    trajectories = _all_trajectories(trees)
    is_successful = torch.tensor(
        [not trajectory.failed for trajectory in trajectories], dtype=torch.bool
    )
    mask_BT = mask_BT & is_successful[trajectory_B].unsqueeze(1)
    if not bool(mask_BT.any()):
        reasons = dict(
            Counter(
                trajectory.failure_reason[:200] or trajectory.stop_reason.value
                for trajectory in trajectories
            )
        )
        raise InputError(
            f"ends of the trajectories of {len(trees)} trees with no token to train on",
            reasons,
            "at least one such token",
            "if they were aborted or failed, the logs of engines, tools and rewards say why",
        )
    return mask_BT


@dataclass(slots=True, frozen=True)
class _RowSegment:
    """Response tokens [start, stop) of a trajectory, sampled after a context."""

    trajectory_index: int
    context_index: int
    """0 for the prompt, i for the context of the i-th reset."""
    context: Prompt | ContextReset
    """The prompt, or what replaced it."""
    start: int
    stop: int


def _row_segments(index: int, trajectory: Trajectory) -> Iterator[_RowSegment]:
    """Yield the non-empty parts of a trajectory, or all of it if its context was never reset."""
    contexts: list[tuple[int, Prompt | ContextReset]] = [(0, trajectory.prompt)]
    contexts += [(reset.start, reset) for reset in trajectory.context_resets]
    stops = [start for start, _ in contexts[1:]] + [len(trajectory.token_ids)]
    for number, ((start, context), stop) in enumerate(zip(contexts, stops, strict=True)):
        if start < stop or len(contexts) == 1:
            yield _RowSegment(index, number, context, start, stop)


def _row_images(
    trajectories: Sequence[Trajectory], rows: Sequence[_RowSegment]
) -> tuple[tuple[PlacedImage, ...], ...] | None:
    """Return the images of each row, loaded and one object for each id; None if there are none."""
    placed = []
    for row in rows:
        trajectory = trajectories[row.trajectory_index]
        placed.append(_shown_images(row.context, trajectory, row.start, row.stop))
    if not any(placed):
        return None
    loaded = _loaded_images(placed)
    return tuple(
        tuple(replace(image, image=loaded[image.image.image_id]) for image in images)
        for images in placed
    )


def _row_routes(
    trajectories: Sequence[Trajectory], rows: Sequence[_RowSegment]
) -> tuple[TokenRoutes | None, ...] | None:
    """Return the routes of the tokens of each row; None if there are none."""
    routes = []
    for row in rows:
        parts = [
            part.routes
            for part in trajectories[row.trajectory_index].routes
            if row.start <= part.response_start < row.stop
        ]
        num_tokens = len(row.context.token_ids) + row.stop - row.start
        routes.append(join_routes(parts).before(num_tokens) if parts else None)
    return tuple(routes) if any(part is not None for part in routes) else None


def _loaded_images(placed: Iterable[Iterable[PlacedImage]]) -> dict[str, ImageInput]:
    """Return an image with pixels for each id.

    A prompt's images are not loaded, but a trajectory's own images may show the same file.
    """
    found: dict[str, ImageInput] = {}
    for image in (part.image for images in placed for part in images):
        if image.image_id not in found or found[image.image_id].pixels_HWC is None:
            found[image.image_id] = image
    for image in found.values():
        if image.pixels_HWC is None:
            name = f"pixels of image {image.image_id} ({image.path or 'from a tool'})"
            expected = "those that the rollout loads (`ImageProcessor.load`)"
            cause = "an agent that has not put the loaded images into the prompt of its trajectory"
            raise InputError(name, None, expected, cause)
    return found


def _pad_to_tensor(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, fill: int
) -> torch.Tensor:
    """Return rows of unequal length as a [B, T] tensor, padded on the right.

    numpy converts lists several times faster than torch, and a batch has millions of numbers.
    """
    padded_BT = torch.full((len(rows), width), fill, dtype=dtype)
    view_BT = padded_BT.numpy()
    for index, row in enumerate(rows):
        view_BT[index, : len(row)] = row
    return padded_BT


def _group_ids(trees: Sequence[RolloutTree]) -> list[int]:
    """Return each trajectory's tree index; failed trajectories get indices after the last tree."""
    failed_ids = count(len(trees))
    return [
        next(failed_ids) if trajectory.failed else index
        for index, tree in enumerate(trees)
        for trajectory in tree.trajectories
    ]


def _tree_token_ids(trees: Sequence[RolloutTree]) -> list[list[int]]:
    """Return the tree-token ids of each trajectory."""
    new_ids = count()
    return [ids for tree in trees for ids in _tree_token_ids_of_one(tree, new_ids)]


def _tree_token_ids_of_one(tree: RolloutTree, new_ids: Iterator[int]) -> Iterator[list[int]]:
    """Yield the tree-token ids of each trajectory of a tree; new tokens get the next `new_ids`."""
    earlier: dict[str, tuple[Trajectory, list[int]]] = {}
    for trajectory in tree.trajectories:
        ids: list[int] = []
        if trajectory.parent_id is not None:
            if trajectory.parent_id not in earlier:
                name = f"parent of trajectory {trajectory.trajectory_id}"
                expected = "one that comes earlier in its tree"
                raise InputError(name, trajectory.parent_id, expected)
            parent, parent_ids = earlier[trajectory.parent_id]
            size = trajectory.fork_len
            if parent.token_ids[:size] != trajectory.token_ids[:size]:
                name = f"first {size} tokens of trajectory {trajectory.trajectory_id}"
                expected = f"those of {trajectory.parent_id} (fork_len={size})"
                raise InputError(name, trajectory.token_ids[:size], expected)
            ids = parent_ids[:size]
        ids += [next(new_ids) for _ in range(len(trajectory.token_ids) - len(ids))]
        earlier[trajectory.trajectory_id] = (trajectory, ids)
        yield ids


def _row_token_ids(
    trees: Sequence[RolloutTree], token_ids: Sequence[list[int]], rows: Sequence[_RowSegment]
) -> list[list[int]]:
    """Return the ids of the tokens of each row, prompt and response, for `order_rows`.

    The rows of a tree share its prompt. A context that replaces another keeps the ids of the tokens
    with which both begin; its other tokens get new ids. Paths with the same history before a reset
    share the new context.
    """
    new_ids = count(1 + max((max(ids, default=0) for ids in token_ids), default=0))
    reset_contexts: dict[_ContextKey, list[int]] = {}
    contexts = []
    ids_of = iter(token_ids)
    for tree in trees:
        prompt = [next(new_ids) for _ in tree.prompt.token_ids]
        contexts += [
            _context_token_ids(trajectory, prompt, next(ids_of), reset_contexts, new_ids)
            for trajectory in tree.trajectories
        ]
    return [
        contexts[row.trajectory_index][row.context_index]
        + token_ids[row.trajectory_index][row.start : row.stop]
        for row in rows
    ]


def _context_token_ids(
    trajectory: Trajectory,
    prompt: list[int],
    ids: list[int],
    reset_contexts: dict[_ContextKey, list[int]],
    new_ids: Iterator[int],
) -> list[list[int]]:
    """Return the token ids of the prompt and of each context that replaced it.

    Args:
        trajectory: The trajectory.
        prompt: Ids of the prompt's tokens.
        ids: Ids of the response tokens.
        reset_contexts: Token ids of the contexts of earlier resets; new contexts are added to it.
        new_ids: Ids for tokens that have none yet.
    """
    contexts, start = [prompt], 0
    context: Prompt | ContextReset = trajectory.prompt
    for reset in trajectory.context_resets:
        image_ids = tuple(placed.image.image_id for placed in reset.images)
        key = (ids[reset.start - 1] if reset.start else prompt[-1], reset.token_ids, image_ids)
        if key not in reset_contexts:
            previous = [*context.token_ids, *trajectory.token_ids[start : reset.start]]
            size = common_length(np.array(previous), np.array(reset.token_ids))
            # Placeholders of different images have equal ids.
            shown = _shown_images(context, trajectory, start, reset.start)
            size = int(min(size, _first_difference(shown, reset.images)))
            previous_ids = contexts[-1] + ids[start : reset.start]
            reset_contexts[key] = previous_ids[:size] + [
                next(new_ids) for _ in reset.token_ids[size:]
            ]
        contexts.append(reset_contexts[key])
        context, start = reset, reset.start
    return contexts


def _shown_images(
    context: Prompt | ContextReset, trajectory: Trajectory, start: int, stop: int
) -> list[PlacedImage]:
    """Return the images of a context and of the response tokens [start, stop) that follow it."""
    offset = len(context.token_ids) - start
    images = [placed for placed in trajectory.images if start <= placed.start < stop]
    return [*context.images, *(placed.shifted(offset) for placed in images)]


def _first_difference(left: Sequence[PlacedImage], right: Sequence[PlacedImage]) -> float:
    """Return the first token at which two sequences show different images; inf if there is none."""
    differences = (
        min(one.start, other.start) for one, other in zip(left, right, strict=False) if one != other
    )
    return next(differences, math.inf)


def _rewards(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return the reward of each trajectory, float32: 0 if it failed, NaN while it is pending."""
    values = []
    for trajectory in trajectories:
        pending = math.nan if trajectory.score is None else trajectory.score.value
        values.append(0.0 if trajectory.failed else pending)
    return torch.tensor(values, dtype=torch.float32)

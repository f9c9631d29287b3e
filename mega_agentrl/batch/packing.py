"""Packs rollout trees into one training batch: rows in tree order, right-padded to the longest.

Every trajectory becomes a row, also a failed one, whose mask is all zero. A trajectory whose
context was rendered anew (`Trajectory.context_resets`) becomes one row per part, each behind the
context it was sampled in; `trajectory_B` then tells which rows belong to one trajectory. `group_B`
numbers the prompts from 0. A failed row gets a group of its own behind these, so that its missing
reward stays out of its prompt's mean. A pending reward is NaN until `fill_rewards`, so that it
cannot be used by mistake. `node_BT` numbers the tokens of all trees: a fork shares the ids of its
parent's first `fork_len` tokens, all other tokens have ids of their own, and the padding is -1.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mega_agentrl.types.batch import TrainBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory

PAD_NODE_ID = -1


def pack_trees(trees: Sequence[RolloutTree]) -> TrainBatch:
    """Return the batch of all trajectories.

    Raises:
        ValueError: there is no token to train on, or a tree is inconsistent.
    """
    trajectories = [one for tree in trees for one in tree.trajectories]
    rows = [
        part
        for owner, trajectory in enumerate(trajectories)
        for part in _row_segments(owner, trajectory)
    ]
    width = max((row.stop - row.start for row in rows), default=0)
    owners = torch.tensor([row.trajectory_index for row in rows], dtype=torch.int64)

    def grid(values: Sequence[Sequence[float]], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        return _pad_to_tensor(
            [values[row.trajectory_index][row.start : row.stop] for row in rows], width, dtype, fill
        )

    mask_BT = grid([one.loss_mask for one in trajectories], torch.bool)
    return TrainBatch(
        prompt_ids=tuple(row.context_ids for row in rows),
        response_BT=grid([one.token_ids for one in trajectories], torch.int64),
        length_B=torch.tensor([row.stop - row.start for row in rows], dtype=torch.int64),
        mask_BT=_mask_failed_rows(mask_BT, trees, owners),
        group_B=torch.tensor(_group_ids(trees), dtype=torch.int64)[owners],
        reward_B=torch.tensor([_reward_value(one) for one in trajectories], dtype=torch.float32)[
            owners
        ],
        node_BT=grid(_node_ids(trees), torch.int64, PAD_NODE_ID),
        rollout_logp_BT=grid([one.logps for one in trajectories], torch.float32),
        rollout_entropy_BT=grid([one.entropies for one in trajectories], torch.float32),
        version_BT=grid([one.versions for one in trajectories], torch.int64),
        trajectory_B=owners if len(rows) > len(trajectories) else None,
    )


def fill_rewards(batch: TrainBatch, trees: Sequence[RolloutTree]) -> TrainBatch:
    """Return the batch with the rewards that were pending when these trees were packed.

    Trajectories that failed since then, because their reward could not be computed, are masked.

    Raises:
        ValueError: a trajectory has no score, or there is no token to train on.
    """
    trajectories = [one for tree in trees for one in tree.trajectories]
    for one in trajectories:
        if one.score is None and not one.failed:
            raise ValueError(
                f"trajectory {one.trajectory_id}: got no score, expected one; was it collected "
                "without a rubric?"
            )
    owners = torch.arange(len(trajectories)) if batch.trajectory_B is None else batch.trajectory_B
    return batch.with_fields(
        mask_BT=_mask_failed_rows(batch.mask_BT, trees, owners),
        group_B=torch.tensor(_group_ids(trees), dtype=torch.int64)[owners],
        reward_B=torch.tensor([_reward_value(one) for one in trajectories], dtype=torch.float32)[
            owners
        ],
        baseline_B=_baseline_rewards(trees, owners),
    )


def pad_response_length(batch: TrainBatch, width: int) -> TrainBatch:
    """Return the validated batch, padded to `width` response positions.

    Raises:
        ValueError: the batch is wider already.
    """
    more = width - batch.response_BT.size(1)
    if more < 0:
        raise ValueError(
            f"pad_response_length: width={width}, expected at least {batch.response_BT.size(1)}, "
            "the width of response_BT"
        )
    return batch.with_fields(
        **{
            spec.name: functional.pad(
                getattr(batch, spec.name),
                (0, more),
                value=PAD_NODE_ID if spec.name == "node_BT" else 0,
            )
            for spec in fields(TrainBatch)
            if spec.name.endswith("_BT") and getattr(batch, spec.name) is not None
        }
    ).validate()


def _baseline_rewards(trees: Sequence[RolloutTree], owners: torch.Tensor) -> torch.Tensor | None:
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
    return torch.tensor(values, dtype=torch.float32)[owners]


def _mask_failed_rows(
    mask_BT: torch.Tensor, trees: Sequence[RolloutTree], owners: torch.Tensor
) -> torch.Tensor:
    """Clear the mask in the rows of failed trajectories; owners: [B] trajectory of each row."""
    trajectories = [one for tree in trees for one in tree.trajectories]
    succeeded = torch.tensor([not one.failed for one in trajectories], dtype=torch.bool)
    mask_BT = mask_BT & succeeded[owners].unsqueeze(1)
    if not bool(mask_BT.any()):
        reasons = dict(
            Counter(one.reward_error[:200] or one.stop_reason.value for one in trajectories)
        )
        raise ValueError(
            f"trees: got {len(trees)} with {len(trajectories)} trajectories and no token to train "
            "on, "
            f"expected at least one; they ended by {reasons}; if they were aborted or failed, "
            "the logs of the engines, tools and rewards say why"
        )
    return mask_BT


@dataclass(slots=True, frozen=True)
class _RowSegment:
    """Response tokens [start, stop) of a trajectory, sampled after `context_ids`."""

    trajectory_index: int
    context_ids: tuple[int, ...]
    start: int
    stop: int


def _row_segments(owner: int, trajectory: Trajectory) -> Iterator[_RowSegment]:
    """Yield the non-empty parts, or the whole trajectory if its context was never reset."""
    contexts = [(0, trajectory.prompt.token_ids)]
    contexts += [(reset.start, reset.token_ids) for reset in trajectory.context_resets]
    stops = [start for start, _ in contexts[1:]] + [len(trajectory.token_ids)]
    for (start, context_ids), stop in zip(contexts, stops, strict=True):
        if start < stop or len(contexts) == 1:
            yield _RowSegment(owner, context_ids, start, stop)


def _pad_to_tensor(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, fill: int
) -> torch.Tensor:
    """Return rows of unequal length as a [B, T] tensor, padded on the right.

    numpy converts lists several times faster than torch, and a batch has millions of numbers.
    """
    grid_BT = torch.full((len(rows), width), fill, dtype=dtype)
    view_BT = grid_BT.numpy()
    for index, row in enumerate(rows):
        view_BT[index, : len(row)] = row
    return grid_BT


def _group_ids(trees: Sequence[RolloutTree]) -> list[int]:
    """Return each trajectory's tree index; failed trajectories get indices beyond these."""
    alone = count(len(trees))
    return [
        next(alone) if trajectory.failed else index
        for index, tree in enumerate(trees)
        for trajectory in tree.trajectories
    ]


def _node_ids(trees: Sequence[RolloutTree]) -> list[list[int]]:
    """Return the tree-token ids of each trajectory."""
    fresh = count()
    return [nodes for tree in trees for nodes in _tree_node_ids(tree, fresh)]


def _tree_node_ids(tree: RolloutTree, fresh: Iterator[int]) -> Iterator[list[int]]:
    known: dict[str, tuple[Trajectory, list[int]]] = {}
    for trajectory in tree.trajectories:
        nodes: list[int] = []
        if trajectory.parent_id is not None:
            if trajectory.parent_id not in known:
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id}: got the parent "
                    f"{trajectory.parent_id}, expected one that comes earlier in its tree"
                )
            parent, parent_nodes = known[trajectory.parent_id]
            size = trajectory.fork_len
            if parent.token_ids[:size] != trajectory.token_ids[:size]:
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id}: its first {size} tokens differ "
                    f"from those of {trajectory.parent_id}, expected the same (fork_len={size})"
                )
            nodes = parent_nodes[:size]
        nodes += [next(fresh) for _ in range(len(trajectory.token_ids) - len(nodes))]
        known[trajectory.trajectory_id] = (trajectory, nodes)
        yield nodes


def _reward_value(trajectory: Trajectory) -> float:
    """Return the reward: 0 for a failed trajectory, NaN while the reward is pending."""
    if trajectory.failed:
        return 0.0
    return math.nan if trajectory.score is None else trajectory.score.value

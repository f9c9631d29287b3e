"""Rollout trees as one training batch: rows in tree order, right-padded to the longest.

Every trajectory becomes a row, also a failed one, whose mask is all zero. One whose context was
rendered anew on the way (`Trajectory.restarts`) becomes a row for each part, behind the context
it was sampled in; `owner_B` then says which rows are one trajectory. `group_B` numbers
the prompts from 0; a failed row gets a number of its own behind them, so that its missing
reward stays out of its group's mean. A reward that is not there yet is NaN until `with_rewards`,
so that nothing can be computed from it unseen. `node_BT` numbers the tokens of all trees: a fork
holds the ids of its parent's tokens up to `fork_len`, everything else is new; padding is -1.
Cutting into micro-batches is `batch.balance`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch

from mega_agentrl.types.batch import TrainBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory

PAD_NODE = -1


def pack(trees: Sequence[RolloutTree]) -> TrainBatch:
    """The batch of all trajectories; raises `ValueError` when no token is left to train on."""
    everyone = [trajectory for tree in trees for trajectory in tree.trajectories]
    rows = [part for owner, trajectory in enumerate(everyone) for part in _parts(owner, trajectory)]
    width = max((row.stop - row.start for row in rows), default=0)
    owners = torch.tensor([row.owner for row in rows], dtype=torch.int64)

    def grid(values: Sequence[Sequence[float]], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        return _grid([values[row.owner][row.start : row.stop] for row in rows], width, dtype, fill)

    mask_BT = grid([one.loss_mask for one in everyone], torch.bool)
    return TrainBatch(
        prompt_ids=tuple(row.context_ids for row in rows),
        response_BT=grid([one.token_ids for one in everyone], torch.int64),
        length_B=torch.tensor([row.stop - row.start for row in rows], dtype=torch.int64),
        mask_BT=_trained(mask_BT, trees, owners),
        group_B=torch.tensor(_groups(trees), dtype=torch.int64)[owners],
        reward_B=torch.tensor([_reward(one) for one in everyone], dtype=torch.float32)[owners],
        node_BT=grid(_nodes(trees), torch.int64, PAD_NODE),
        rollout_logp_BT=grid([one.logps for one in everyone], torch.float32),
        rollout_entropy_BT=grid([one.entropies for one in everyone], torch.float32),
        version_BT=grid([one.versions for one in everyone], torch.int64),
        owner_B=owners if len(rows) > len(everyone) else None,
    )


def with_rewards(batch: TrainBatch, trees: Sequence[RolloutTree]) -> TrainBatch:
    """The batch that was packed of these trees, with the rewards that have come since.

    Trajectories that have failed since, because there is no reward for them, are masked now.
    Raises `ValueError` for one that is not scored, and when no token is left to train on.
    """
    everyone = [trajectory for tree in trees for trajectory in tree.trajectories]
    for one in everyone:
        if one.score is None and not one.failed:
            raise ValueError(
                f"trajectory {one.trajectory_id}: got no score, expected one; was it collected "
                "without a rubric?"
            )
    owners = torch.arange(len(everyone)) if batch.owner_B is None else batch.owner_B
    return batch.with_fields(
        mask_BT=_trained(batch.mask_BT, trees, owners),
        group_B=torch.tensor(_groups(trees), dtype=torch.int64)[owners],
        reward_B=torch.tensor([_reward(one) for one in everyone], dtype=torch.float32)[owners],
        baseline_B=_baselines(trees, owners),
    )


def _baselines(trees: Sequence[RolloutTree], owners: torch.Tensor) -> torch.Tensor | None:
    """[B] reward of the greedy answer beside each row's tree; NaN where it failed."""
    if all(tree.greedy is None for tree in trees):
        return None
    values = []
    for tree in trees:
        score = None if tree.greedy is None or tree.greedy.failed else tree.greedy.score
        values += [math.nan if score is None else score.value] * len(tree.trajectories)
    return torch.tensor(values, dtype=torch.float32)[owners]


def _trained(
    mask_BT: torch.Tensor, trees: Sequence[RolloutTree], owners: torch.Tensor
) -> torch.Tensor:
    """The mask without the rows of failed trajectories; owners: [B] whose row each one is."""
    everyone = [trajectory for tree in trees for trajectory in tree.trajectories]
    kept = torch.tensor([not one.failed for one in everyone], dtype=torch.bool)
    mask_BT = mask_BT & kept[owners].unsqueeze(1)
    if not bool(mask_BT.any()):
        reasons = dict(Counter(one.no_reward[:200] or one.stop_reason.value for one in everyone))
        raise ValueError(
            f"trees: got {len(trees)} with {len(everyone)} trajectories and no token to train on, "
            f"expected at least one; they ended by {reasons}; if they were aborted or failed, "
            "the logs of the engines, tools and rewards say why"
        )
    return mask_BT


@dataclass(slots=True, frozen=True)
class _Part:
    """Response tokens [start, stop) of a trajectory, sampled behind `context_ids`."""

    owner: int
    context_ids: tuple[int, ...]
    start: int
    stop: int


def _parts(owner: int, trajectory: Trajectory) -> Iterator[_Part]:
    """The parts that hold a token; the whole trajectory where it was never restarted."""
    contexts = [(0, trajectory.prompt.token_ids)]
    contexts += [(restart.start, restart.token_ids) for restart in trajectory.restarts]
    stops = [start for start, _ in contexts[1:]] + [len(trajectory.token_ids)]
    for (start, context_ids), stop in zip(contexts, stops, strict=True):
        if start < stop or len(contexts) == 1:
            yield _Part(owner, context_ids, start, stop)


def _grid(
    rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, fill: int
) -> torch.Tensor:
    """Rows of unequal length as [B, T], padded on the right.

    numpy reads a list several times as fast as torch does, and there are millions of numbers.
    """
    grid_BT = torch.full((len(rows), width), fill, dtype=dtype)
    view_BT = grid_BT.numpy()
    for index, row in enumerate(rows):
        view_BT[index, : len(row)] = row
    return grid_BT


def _groups(trees: Sequence[RolloutTree]) -> list[int]:
    """The number of its tree for each row; failed rows are numbered on from there."""
    alone = count(len(trees))
    return [
        next(alone) if trajectory.failed else index
        for index, tree in enumerate(trees)
        for trajectory in tree.trajectories
    ]


def _nodes(trees: Sequence[RolloutTree]) -> list[list[int]]:
    """Ids of the tree tokens of each row."""
    fresh = count()
    return [nodes for tree in trees for nodes in _tree_nodes(tree, fresh)]


def _tree_nodes(tree: RolloutTree, fresh: Iterator[int]) -> Iterator[list[int]]:
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


def _reward(trajectory: Trajectory) -> float:
    """Its reward; 0 for a failed one, which nothing reads; NaN where it is not there yet."""
    if trajectory.failed:
        return 0.0
    return math.nan if trajectory.score is None else trajectory.score.value

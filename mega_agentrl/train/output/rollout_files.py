"""Rollout trees in the run folder: `rollouts/`, one file per step or validation pass.

    step_000020.jsonl              every `report.save_trees_every_steps`-th RL step, and the last
    step_000020.advantages.json    the advantages of its trajectories
    held_out_before.jsonl, held_out_after.jsonl, held_out_before_greedy.jsonl, ...
    held_out_step_000020.jsonl     of a validation within RL

The format of the trees is that of `rollout.io.tree_file`. Advantages are computed after the trees
are complete, so they have a file of their own: an object from trajectory id to the mean advantage
of its trained tokens, without the trajectories that have none. With
`report.save_trees_every_steps=0` nothing is saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.rollout.io.tree_file import write_trees
from mega_agentrl.train.trajectory_rows import row_trajectories
from mega_agentrl.types.atomic_file import atomic_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

ROLLOUT_DIR = "rollouts"
ADVANTAGES_SUFFIX = ".advantages.json"


class RolloutWriter:
    """Selects and writes the trees of a run."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self._rollout_dir = run_dir / ROLLOUT_DIR
        self._every_steps = config.report.save_trees_every_steps
        self._last_step = config.total_steps

    def should_save(self, step: int) -> bool:
        """Return whether the trees of an RL step are saved."""
        return bool(self._every_steps) and (
            step % self._every_steps == 0 or step == self._last_step
        )

    def save_step(self, step: int, trees: Sequence[RolloutTree], batch: TrainBatch) -> None:
        """Write the trees of an RL step; `batch` is packed from them, with advantages."""
        path = self._rollout_dir / f"step_{step:06d}.jsonl"
        write_trees(path, trees, stage="rl", step=step)
        write_advantages(path, mean_advantages(trees, batch))

    def save_validation(
        self, when: str, suffix: str, step: int, trees: Sequence[RolloutTree]
    ) -> None:
        """Write the trees of a validation pass.

        Args:
            when: "before", "during" or "after" RL.
            suffix: End of the file's name, "" or "_greedy".
            step: RL steps made so far.
            trees: The trees.
        """
        if self._every_steps:
            name = f"step_{step:06d}" if when == "during" else when
            path = self._rollout_dir / f"held_out_{name}{suffix}.jsonl"
            write_trees(path, trees, stage=f"held_out_{when}{suffix}", step=step)


def mean_advantages(trees: Sequence[RolloutTree], batch: TrainBatch) -> dict[str, float]:
    """Return the mean advantage by trajectory id; `batch` is packed from `trees`.

    Raises:
        ValueError: The batch has no advantages, or rows of other trajectories.
    """
    trajectory_ids = [
        trajectory.trajectory_id for tree in trees for trajectory in tree.trajectories
    ]
    owners = row_trajectories(batch)
    if batch.advantage_BT is None or not set(owners) <= set(range(len(trajectory_ids))):
        got = None if batch.advantage_BT is None else f"those of {1 + max(owners)} trajectories"
        expected = f"those of a batch packed from these {len(trajectory_ids)} trajectories"
        raise InputError("advantages of a step", got, expected)
    sums, counts = [0.0] * len(trajectory_ids), [0] * len(trajectory_ids)
    total_B = batch.advantage_BT.masked_fill(~batch.mask_BT, 0.0).double().sum(dim=1)
    for owner, total, count in zip(
        owners, total_B.tolist(), batch.mask_BT.sum(dim=1).tolist(), strict=True
    ):
        sums[owner] += total
        counts[owner] += count
    return {
        name: total / count
        for name, total, count in zip(trajectory_ids, sums, counts, strict=True)
        if count
    }


def write_advantages(trees_file: Path, advantages: dict[str, float]) -> None:
    """Write the advantages beside a file of trees, atomically."""
    path = trees_file.with_suffix(ADVANTAGES_SUFFIX)
    atomic_write(path, json.dumps(advantages) + "\n")


def read_advantages(trees_file: Path) -> dict[str, float]:
    """Read the advantages beside a file of trees; empty if there are none.

    Raises:
        ValueError: The file contains something else.
    """
    path = trees_file.with_suffix(ADVANTAGES_SUFFIX)
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(str(path), error, "numbers by trajectory id") from None

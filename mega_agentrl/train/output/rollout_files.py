"""Rollout trees in the run folder: `rollouts/`, one file per step or validation pass.

    step_000020.jsonl              every `report.save_trees_every_steps`-th RL step, and the last
    step_000020.advantages.json    the advantages of its trajectories
    held_out_before.jsonl, held_out_after.jsonl, held_out_before_greedy.jsonl, ...
    held_out_step_000020.jsonl     of a validation within RL

The format is that of `rollout.io.tree_file`. With `report.save_trees_every_steps=0` nothing is
saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.rollout.io.tree_file import write_trees
from mega_agentrl.train.output.advantage_file import mean_advantages, write_advantages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

ROLLOUT_DIR = "rollouts"


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

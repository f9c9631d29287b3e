"""Which rollout trees of a run are kept: `rollouts/` in the run folder, one file per evaluation
of all prompts (format: `rollout.tree_file`).

    step_000020.jsonl                 every `report.trees_every`-th RL step, and the last one
    step_000020.advantages.json       beside it, what the algorithm made of its trajectories
    held_out_before.jsonl, held_out_after.jsonl, held_out_before_greedy.jsonl, ...
    held_out_step_000020.jsonl        of an evaluation within RL

With `report.trees_every=0` nothing is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.rollout.tree_file import write_trees
from mega_agentrl.train.advantage_file import mean_advantages, write_advantages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.records import RolloutTree

FOLDER = "rollouts"


class RolloutFiles:
    """Chooses and writes the trees of a run."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self._folder = run_dir / FOLDER
        self._every = config.report.trees_every
        self._last = config.total_steps

    def chosen(self, step: int) -> bool:
        """Whether the trees of an RL step are kept."""
        return bool(self._every) and (step % self._every == 0 or step == self._last)

    def keep_step(self, step: int, trees: Sequence[RolloutTree], batch: TrainBatch) -> None:
        """Write the trees of a chosen RL step; batch: packed of these, with its advantages."""
        path = self._folder / f"step_{step:06d}.jsonl"
        write_trees(path, trees, stage="rl", step=step)
        write_advantages(path, mean_advantages(trees, batch))

    def keep_held_out(self, when: str, end: str, step: int, trees: Sequence[RolloutTree]) -> None:
        """Trees of a held-out evaluation; when: before, during or after; end: "" or "_greedy"."""
        if self._every:
            name = f"step_{step:06d}" if when == "during" else when
            path = self._folder / f"held_out_{name}{end}.jsonl"
            write_trees(path, trees, stage=f"held_out_{when}{end}", step=step)

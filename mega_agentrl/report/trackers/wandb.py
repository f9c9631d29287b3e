"""Weights & Biases. Project, entity and mode are its own variables' business (WANDB_PROJECT,
WANDB_ENTITY, WANDB_MODE=offline); files go below the run folder.

Its steps must grow over a whole run, ours begin again with each stage: each stage gets a metric
``stage/step`` of its own, which its curves are drawn over. A step that is made again after a
restart is there twice, the later one behind the earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class WandbTracker:
    """A `types.watch.Tracker`. wandb: the package. run_id: of the run to go on with, or empty.

    Raises `ValueError` where no run can be had; what happens to its server later is its own
    business, which it does in a process of its own.
    """

    def __init__(self, wandb: Any, run_dir: Path, run_id: str) -> None:
        try:
            self._run = wandb.init(
                name=run_dir.name, dir=str(run_dir), id=run_id or None, resume="allow"
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"report.trackers=wandb: {error}; expected a login (`wandb login`) and a server "
                "that answers, or WANDB_MODE=offline"
            ) from error
        self.run_id: str = self._run.id
        self._stages: set[str] = set()
        self._is_open = True

    def configure(self, settings: Mapping[str, object], text: str) -> None:
        """See `types.watch.Tracker`; a run that goes on may have other values than before."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """See `types.watch.Tracker`."""
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        named = {f"{stage}/{name}": value for name, value in numbers.items()}
        self._run.log({**named, f"{stage}/step": step})

    def close(self) -> None:
        """See `types.watch.Tracker`."""
        if self._is_open:
            self._is_open = False
            self._run.finish()

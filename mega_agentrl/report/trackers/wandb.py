"""Weights & Biases tracker.

W&B reads project, entity and mode from its own variables (WANDB_PROJECT, WANDB_ENTITY,
WANDB_MODE=offline); its files are below the run folder.

W&B requires steps that grow over the whole run, but the steps of each stage start at 1. Each stage
therefore has a metric ``stage/step`` as the x axis of its curves. A step repeated after a restart
appears twice, the later values after the earlier ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class WandbTracker:
    """Logs metrics to a W&B run, which uploads them from its own process.

    Args:
        wandb: the package.
        run_dir: folder for W&B's files, whose name is that of the run.
        run_id: run to continue, or empty.

    Raises:
        ValueError: the run cannot be created.
    """

    def __init__(self, wandb: Any, run_dir: Path, run_id: str) -> None:
        try:
            self._run = wandb.init(
                name=run_dir.name, dir=str(run_dir), id=run_id or None, resume="allow"
            )
        except wandb.errors.Error as error:
            expected = "a login (`wandb login`) and a server that answers, or WANDB_MODE=offline"
            raise ConfigError("report.trackers", "wandb", expected, str(error)) from error
        self.run_id: str = self._run.id
        self._stages: set[str] = set()
        self._is_open = True

    def log_config(self, settings: Mapping[str, object], text: str) -> None:
        """Log the settings; a resumed run may have changed values."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log metrics as `stage/name`."""
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        named = {f"{stage}/{name}": value for name, value in numbers.items()}
        self._run.log({**named, f"{stage}/step": step})

    def close(self) -> None:
        """Finish the run; safe to call twice."""
        if self._is_open:
            self._is_open = False
            self._run.finish()

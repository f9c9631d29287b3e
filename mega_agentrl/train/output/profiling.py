"""Profile the log-prob pass and the update of `report.profile_steps`, on rank 0.

The result is a Chrome trace (`chrome://tracing`, https://ui.perfetto.dev) in
``profile/step-<n>-rank0.json`` of the run folder. The time between the two calls shows as a gap.
Profiling slows the step down; a step that fails leaves no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.components import Components

PROFILE_DIR = "profile"


def start_profile(components: Components, config: TrainConfig, step: int) -> None:
    """Start the profile of a chosen step, before its log-prob pass."""
    if step in config.report.profile_steps:
        components.policy.start_profile()


def stop_profile(components: Components, config: TrainConfig, step: int) -> None:
    """Stop the profile of a chosen step after its update, and write the file."""
    if step in config.report.profile_steps:
        folder = Path(config.run_dir) / PROFILE_DIR
        components.policy.stop_profile(folder / f"step-{step}-rank0.json")

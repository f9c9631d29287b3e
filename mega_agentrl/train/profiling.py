"""Traces of chosen steps: the log-prob pass and the update of `report.profile_steps`, on rank 0.

A trace is a chrome trace (`chrome://tracing`, https://ui.perfetto.dev) in
``profile/step-<n>-rank0.json`` of the run folder. What the rank waits for between the two calls is
in it as a gap. Tracing slows the step down; a step that fails leaves no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.parts import Parts

FOLDER = "profile"


def begin_profile(parts: Parts, config: TrainConfig, step: int) -> None:
    """Begin the trace of a step that is chosen; before its log-prob pass."""
    if step in config.report.profile_steps:
        parts.policy.begin_profile()


def end_profile(parts: Parts, config: TrainConfig, step: int) -> None:
    """End it and write the file; after its update."""
    if step in config.report.profile_steps:
        folder = Path(config.run_dir) / FOLDER
        parts.policy.end_profile(folder / f"step-{step}-rank0.json")

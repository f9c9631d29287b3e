"""A trace of what one rank does between two calls: torch's profiler, CPU and CUDA.

Shapes, stacks and memory are left out: they multiply size and cost of the trace, and who needs
them is looking at one kernel and not at a step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfile:
    """At most one trace at a time."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def begin(self) -> None:
        """Begin a trace; one that was never ended, as its step failed, is dropped."""
        self._drop()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self, file: Path) -> None:
        """End the trace and write it, whole or not at all; raises `ValueError` without one."""
        if self._profile is None:
            raise ValueError(
                f"{file}: got no trace, expected begin_profile() before end_profile(); probable "
                "cause: the rank was restarted in between"
            )
        running, self._profile = self._profile, None
        running.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial.json")
        running.export_chrome_trace(str(partial))
        partial.replace(file)

    def _drop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

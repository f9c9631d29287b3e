"""Profiler traces of one rank between two calls, with torch's profiler for CPU and CUDA.

Shapes, stacks and memory are not recorded: they multiply the size and cost of a trace, and are
of use for a single kernel rather than for a step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Records at most one trace at a time."""

    def __init__(self) -> None:
        self._profiler: profile | None = None

    def start(self) -> None:
        """Start a trace; an unfinished one, left by a failed step, is dropped."""
        self._discard()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def stop(self, file: Path) -> None:
        """Stop the trace and write it atomically as a Chrome trace.

        Raises:
            ValueError: If no trace was started.
        """
        if self._profiler is None:
            raise ValueError(
                f"{file}: got no trace, expected start_profile() before stop_profile(); probable "
                "cause: the rank was restarted in between"
            )
        running, self._profiler = self._profiler, None
        running.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial.json")
        running.export_chrome_trace(str(partial))
        partial.replace(file)

    def _discard(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

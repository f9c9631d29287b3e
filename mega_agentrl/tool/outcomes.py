"""Counts outcomes and latency by tool, for the run's metrics. Cumulative; cheap to add to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.types.records import ToolOutcome


@dataclass(slots=True)
class _Tally:
    count: dict[ToolStatus, int] = field(default_factory=lambda: dict.fromkeys(ToolStatus, 0))
    latency_sum_s: float = 0.0
    latency_max_s: float = 0.0


class OutcomeCounter:
    """Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = {}

    def add(self, outcome: ToolOutcome) -> None:
        """Count one outcome."""
        with self._lock:
            tally = self._tallies.setdefault(outcome.tool, _Tally())
            tally.count[outcome.status] += 1
            tally.latency_sum_s += outcome.latency_s
            tally.latency_max_s = max(tally.latency_max_s, outcome.latency_s)

    def metrics(self) -> dict[str, float]:
        """`tool/<name>/num_calls`, `num_<status>`, `latency_mean_s`, `latency_max_s`."""
        values: dict[str, float] = {}
        with self._lock:
            for name, tally in sorted(self._tallies.items()):
                num_calls = sum(tally.count.values())
                values[f"tool/{name}/num_calls"] = float(num_calls)
                for status, count in tally.count.items():
                    values[f"tool/{name}/num_{status.value}"] = float(count)
                values[f"tool/{name}/latency_mean_s"] = tally.latency_sum_s / num_calls
                values[f"tool/{name}/latency_max_s"] = tally.latency_max_s
        return values

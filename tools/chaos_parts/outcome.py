"""Compares the prompts and losses of a disturbed run with those of an undisturbed one.

A sandbox host that dies loses its running calls. Their trajectories are excluded from the loss,
because it is unknown whether such a call took effect. From the first step with such a failure on,
losses may differ and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_agentrl.rollout.io.tree_file import read_trees
from tools.chaos_parts.run import metrics

LOSS_TOLERANCE = 1e-6
_IGNORED_METRICS = (
    *("time/", "seconds", "throughput/", "latency", "queue_s", "run_s"),
    *("weight_sync/total_s", "weight_sync/transfer_s", "weight_sync/verify_s"),
    *("memory/", "driver/", "gateway/", "num_groups_restored"),
)
"""Substrings of the names of metrics that may differ between equal runs."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run did, by RL step."""

    prompts: tuple[tuple[str, ...], ...]
    """Prompt ids of each step."""
    losses: tuple[float, ...]
    """Policy loss of each step."""
    num_failed: tuple[int, ...]
    """Number of trajectories that failed because of the engine or a tool, by step."""
    lines: tuple[dict[str, Any], ...]
    """All metrics that must be equal, by line."""

    @property
    def num_compared(self) -> int:
        """Number of steps before the first failed trajectory."""
        failed = [number for number, num in enumerate(self.num_failed) if num]
        return min(failed, default=len(self.losses))


def read_outcome(folder: Path) -> RunOutcome:
    """Read the outcome of a finished run with `report.save_trees_every_steps=1`."""
    lines = metrics(folder)
    rl = [line for line in lines if line["stage"] == "rl"]
    return RunOutcome(
        prompts=tuple(_prompts(folder, line["step"]) for line in rl),
        losses=tuple(line["actor/loss"] for line in rl),
        num_failed=tuple(_num_failed(folder, line["step"]) for line in rl),
        lines=tuple({k: v for k, v in line.items() if not _is_ignored_metric(k)} for line in lines),
    )


def differences(expected: RunOutcome, outcome: RunOutcome) -> list[str]:
    """Return the differences of a disturbed run from the expected outcome."""
    problems = []
    if outcome.prompts != expected.prompts:
        pairs = zip(expected.prompts, outcome.prompts, strict=False)
        first = next((k for k, (a, b) in enumerate(pairs, 1) if a != b), len(outcome.prompts) + 1)
        problems.append(
            f"prompts: got {len(outcome.prompts)} steps, expected {len(expected.prompts)} with the "
            f"same prompts; the first difference is in step {first}"
        )
    if len(outcome.losses) == len(expected.losses):
        num = outcome.num_compared
        pairs = zip(expected.losses[:num], outcome.losses[:num], strict=True)
        gaps = [abs(a - b) for a, b in pairs]
        if not all(gap <= LOSS_TOLERANCE for gap in gaps):
            step = next(k for k, gap in enumerate(gaps, 1) if not gap <= LOSS_TOLERANCE)
            problems.append(
                f"losses: from step {step} on they differ by up to {max(gaps):.3g}, expected at "
                f"most {LOSS_TOLERANCE:g}"
            )
    return problems


def _prompts(folder: Path, step: int) -> tuple[str, ...]:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    return tuple(stored.tree.prompt.prompt_id for stored in read_trees(path))


def _num_failed(folder: Path, step: int) -> int:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    ends = [
        leaf.record_fields["stop_reason"]
        for stored in read_trees(path)
        for leaf in stored.tree.leaves
    ]
    return sum(end.is_failure for end in ends)


def _is_ignored_metric(name: str) -> bool:
    return any(part in name for part in _IGNORED_METRICS) or name.endswith("_s")

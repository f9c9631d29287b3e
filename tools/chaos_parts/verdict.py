"""Whether a disturbed run ended as the undisturbed one: its prompts, and its losses.

A host of sandboxes that dies takes the calls it was at with it, and their trajectories are left
out of the loss, as nobody knows whether such a call has run. From the first step with such a
failure on losses may differ, and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_agentrl.rollout.tree_file import read_trees
from tools.chaos_parts.run import metrics

LOSS_TOLERANCE = 1e-6
_FREE = (
    *("time/", "seconds", "throughput/", "latency", "queue_s", "run_s"),
    *("memory/", "groups_reused"),
)
"""In names of metrics that may differ between two runs that do the same."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did, by RL step. lines: all metrics that must be the same.

    num_failed: trajectories that engine or tools failed.
    """

    prompts: tuple[tuple[str, ...], ...]
    losses: tuple[float, ...]
    num_failed: tuple[int, ...]
    lines: tuple[dict[str, Any], ...]

    @property
    def num_compared(self) -> int:
        """Steps before the first failure."""
        failed = [number for number, num in enumerate(self.num_failed) if num]
        return min(failed, default=len(self.losses))


def read_outcome(folder: Path) -> Outcome:
    """Of a finished run with `report.trees_every=1`."""
    lines = metrics(folder)
    rl = [line for line in lines if line["stage"] == "rl"]
    return Outcome(
        prompts=tuple(_prompts(folder, line["step"]) for line in rl),
        losses=tuple(line["update/loss"] for line in rl),
        num_failed=tuple(_num_failed(folder, line["step"]) for line in rl),
        lines=tuple({k: v for k, v in line.items() if not _is_free(k)} for line in lines),
    )


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """What is wrong with a disturbed run; empty for nothing."""
    wrong = []
    if found.prompts != expected.prompts:
        pairs = zip(expected.prompts, found.prompts, strict=False)
        first = next((k for k, (a, b) in enumerate(pairs, 1) if a != b), len(found.prompts) + 1)
        wrong.append(
            f"prompts: {len(found.prompts)} steps, expected {len(expected.prompts)}, the same; "
            f"the first to differ is step {first}"
        )
    if len(found.losses) == len(expected.losses):
        upto = found.num_compared
        pairs = zip(expected.losses[:upto], found.losses[:upto], strict=True)
        gaps = [abs(a - b) for a, b in pairs]
        if not all(gap <= LOSS_TOLERANCE for gap in gaps):
            step = next(k for k, gap in enumerate(gaps, 1) if not gap <= LOSS_TOLERANCE)
            wrong.append(
                f"losses differ from step {step} on, by {max(gaps):.3g} at most, expected "
                f"{LOSS_TOLERANCE:g}"
            )
    return wrong


def _prompts(folder: Path, step: int) -> tuple[str, ...]:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    return tuple(stored.tree.prompt.prompt_id for stored in read_trees(path))


def _num_failed(folder: Path, step: int) -> int:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    ends = [leaf.facts["stop_reason"] for stored in read_trees(path) for leaf in stored.tree.leaves]
    return sum(end.is_failure for end in ends)


def _is_free(name: str) -> bool:
    return any(part in name for part in _FREE) or name.endswith("_s")

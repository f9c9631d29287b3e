"""Results of optimizer steps, and how those of an update are combined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mega_agentrl.types.batch import UpdateStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.batch.packed_rows import PackedScores


class RouteTotals(NamedTuple):
    """Numbers of pairs of a token and a layer with experts, of all ranks."""

    num_pairs: int = 0
    num_replayed: int = 0
    """Pairs whose experts were replayed."""
    num_differing: int = 0
    """Replayed pairs for which the policy itself would have chosen other experts."""


NO_ROUTES = RouteTotals()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one optimizer step."""

    metric_sums: dict[str, float]
    """Metrics summed over all tokens of the step, by name."""
    grad_norm: float
    """Gradient norm of the whole model before clipping."""
    learning_rate: float
    applied: bool
    """False if the step was skipped because the gradient norm is not finite."""
    routes: RouteTotals = NO_ROUTES
    """Counts of the routes that were replayed."""
    scores: PackedScores | None = None
    """The head's values before the step, 0 for tokens that are not trained on, if they were asked
    for; None on ranks that return none."""


def summarize_steps(steps: Sequence[StepResult], names: Sequence[str]) -> UpdateStats:
    """Combine the optimizer steps of one update.

    The loss is averaged over the steps and each metric in `names` over all their tokens. The
    gradient norm is averaged over the applied steps and NaN if there are none.
    """
    num_tokens = sum(step.metric_sums["num_tokens"] for step in steps)
    norms = [step.grad_norm for step in steps if step.applied] or [math.nan]
    return UpdateStats(
        loss=sum(step.metric_sums["loss"] for step in steps) / max(1, len(steps)),
        grad_norm=sum(norms) / len(norms),
        learning_rate=steps[-1].learning_rate if steps else 0.0,
        num_tokens=int(num_tokens),
        num_skipped_steps=sum(not step.applied for step in steps),
        metrics={
            name: sum(step.metric_sums[name] for step in steps) / max(1.0, num_tokens)
            for name in names
        },
    )


def route_metrics(steps: Sequence[StepResult]) -> dict[str, float]:
    """Return the shares of replayed routes and of those that the policy would not have chosen.

    The result is empty if no step replayed any.
    """
    num_replayed = sum(step.routes.num_replayed for step in steps)
    if not num_replayed:
        return {}
    num_differing = sum(step.routes.num_differing for step in steps)
    return {
        "routes_replayed": num_replayed / sum(step.routes.num_pairs for step in steps),
        "routes_differing": num_differing / num_replayed,
    }

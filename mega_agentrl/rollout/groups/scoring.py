"""Scoring of finished trees, immediately or through futures.

`start_scores` scores the trajectories of a tree and returns the scores that are still being
computed. The caller waits for them with `wait_for_scores` on an event loop, or with
`resolve_scores` without one; the workers that compute them have their own deadlines. A trajectory
whose reward cannot be computed counts as failed, never as a reward of 0. One that the reward
functions gave no score on purpose is left out of its group, but is no failure.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.types.errors import RewardAbstainedError, RewardError
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.rollout.tracing import RolloutSpans
    from mega_agentrl.types.protocols import Rubric
    from mega_agentrl.types.records import RolloutTree, Trajectory


@dataclass(slots=True, kw_only=True, frozen=True)
class PendingScore:
    """A score that is being computed."""

    trajectory: Trajectory
    future: Future[Score]
    spans: RolloutSpans | None = None
    """Spans of the run, which record the score; None without tracing."""

    def resolve(self) -> None:
        """Block until the score is known and record it, or why there is none; idempotent."""
        try:
            self.trajectory.score = self.future.result()
        except RewardAbstainedError:
            self.trajectory.reward_abstained = True
        except RewardError as error:
            self.trajectory.reward_error = str(error)
        except CancelledError:
            self.trajectory.reward_error = "the computation of the reward was cancelled"
        if self.spans is not None:
            self.spans.record_score(self.trajectory)


def start_scores(
    tree: RolloutTree, rubric: Rubric, spans: RolloutSpans | None = None
) -> list[PendingScore]:
    """Start scoring all trajectories that did not fail, including the greedy one.

    Returns the scores that are still being computed.
    """
    pending: list[PendingScore] = []
    for trajectory in tree.all_trajectories:
        score = None if trajectory.failed else rubric.score(trajectory)
        if score is not None and not isinstance(score, Score):
            pending.append(PendingScore(trajectory=trajectory, future=score, spans=spans))
            continue
        trajectory.score = score
        if spans is not None:
            spans.record_score(trajectory)
    return pending


async def wait_for_scores(pending: Sequence[PendingScore]) -> None:
    """Wait for all scores and record them; cancellation cancels their futures."""
    futures = [asyncio.wrap_future(score.future) for score in pending]
    await asyncio.gather(*futures, return_exceptions=True)
    resolve_scores(pending)


def resolve_scores(pending: Iterable[PendingScore]) -> None:
    """Block until all scores are known and record them."""
    for score in pending:
        score.resolve()


def cancel_scores(pending: Iterable[PendingScore]) -> None:
    """Cancel scores and end the spans of their trajectories."""
    for score in pending:
        score.future.cancel()
        if score.spans is not None:
            score.spans.record_score(score.trajectory)


def valid_scores(trajectories: Iterable[Trajectory]) -> list[Score]:
    """Return the scores of the trajectories that have one and did not fail."""
    return [
        trajectory.score
        for trajectory in trajectories
        if trajectory.score is not None and not trajectory.failed
    ]

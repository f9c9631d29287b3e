"""Scores of finished trees: those that are there at once, and those that others work on.

`start_scores` consumes a tree and a rubric and starts every score of it; what it returns is what
is missing. Whoever needs the scores waits for it, `wait_for` among other tasks, `settle` where
there is no loop; both are unblocked by the deadlines of those that work on it. A trajectory whose
reward cannot be had is a failed one: it says nothing about the policy and is never a 0.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.types.faults import RewardFault
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.rollout.spans import RolloutSpans
    from mega_agentrl.types.ports import Rubric
    from mega_agentrl.types.records import RolloutTree, Trajectory


@dataclass(slots=True, kw_only=True, frozen=True)
class PendingScore:
    """A trajectory whose score is being worked on. spans: where it is noted, too."""

    trajectory: Trajectory
    future: Future[Score]
    spans: RolloutSpans | None = None

    def settle(self) -> None:
        """Wait for the score, and note it or why there is none; the second time does nothing."""
        try:
            self.trajectory.score = self.future.result()
        except RewardFault as error:
            self.trajectory.no_reward = str(error)
        except CancelledError:
            self.trajectory.no_reward = "those that worked on the reward were ended"
        if self.spans is not None:
            self.spans.scored(self.trajectory)


def start_scores(
    tree: RolloutTree, rubric: Rubric, spans: RolloutSpans | None = None
) -> list[PendingScore]:
    """Score all that did not fail, the greedy answer too; what has to be waited for.

    spans: those of the trajectories, which get their scores.
    """
    pending: list[PendingScore] = []
    for trajectory in tree.with_greedy:
        score = None if trajectory.failed else rubric.score(trajectory)
        if score is not None and not isinstance(score, Score):
            pending.append(PendingScore(trajectory=trajectory, future=score, spans=spans))
            continue
        trajectory.score = score
        if spans is not None:
            spans.scored(trajectory)
    return pending


async def wait_for(pending: Sequence[PendingScore]) -> None:
    """Until all are settled; being cancelled forgets them."""
    waiting = [asyncio.wrap_future(one.future) for one in pending]
    await asyncio.gather(*waiting, return_exceptions=True)
    settle(pending)


def settle(pending: Iterable[PendingScore]) -> None:
    """The same without an event loop."""
    for one in pending:
        one.settle()


def forget(pending: Iterable[PendingScore]) -> None:
    """Nobody needs these any more."""
    for one in pending:
        one.future.cancel()
        if one.spans is not None:
            one.spans.scored(one.trajectory)

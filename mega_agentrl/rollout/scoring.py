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

    from mega_agentrl.types.ports import Rubric
    from mega_agentrl.types.records import RolloutTree, Trajectory


@dataclass(slots=True, kw_only=True, frozen=True)
class PendingScore:
    """A trajectory whose score is being worked on."""

    trajectory: Trajectory
    future: Future[Score]

    def settle(self) -> None:
        """Wait for the score, and note it or why there is none; the second time does nothing."""
        try:
            self.trajectory.score = self.future.result()
        except RewardFault as error:
            self.trajectory.no_reward = str(error)
        except CancelledError:
            self.trajectory.no_reward = "those that worked on the reward were ended"


def start_scores(tree: RolloutTree, rubric: Rubric) -> list[PendingScore]:
    """Score all that did not fail, the greedy answer too; what has to be waited for."""
    pending: list[PendingScore] = []
    for trajectory in tree.with_greedy:
        if trajectory.failed:
            continue
        score = rubric.score(trajectory)
        if isinstance(score, Score):
            trajectory.score = score
        else:
            pending.append(PendingScore(trajectory=trajectory, future=score))
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

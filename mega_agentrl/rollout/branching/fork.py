"""Fork decisions of one path, and copies of tools and user for a fork.

`ForkDecider` asks the branch policy, takes the forks from the budget and records every decision,
including those not to fork. `fork_sessions` copies tools and user; an error in copying is returned
instead of the copy, so that only the fork fails. The trajectory starts the fork itself.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching.policy import ForkPoint, TurnStart
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.types.records import BranchDecision

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from mega_agentrl.rollout.branching.policy import BranchPolicy, ForkBudget
    from mega_agentrl.types.protocols import InteractionSession, ToolSession
    from mega_agentrl.types.records import Role


_log = logging.getLogger(__name__)


class ForkDecider:
    """Decides about the forks of one path and records the decisions.

    `num_consecutive_forks` is the number of most recent consecutive decisions, inherited ones
    included, that forked.
    """

    def __init__(
        self,
        policy: BranchPolicy,
        path: tuple[int, ...],
        budget: ForkBudget,
        num_consecutive_forks: int,
    ) -> None:
        self.num_consecutive_forks = num_consecutive_forks
        self.decisions: list[BranchDecision] = []
        self._policy = policy
        self._path = path
        self._budget = budget

    def num_probe_tokens(self, position: int, previous_role: Role) -> int:
        """Return how many tokens to sample before `decide` at the start of a turn; 0 skips it.

        Args:
            position: Number of response tokens before the turn.
            previous_role: Author of the preceding turn.
        """
        if not self._budget.num_left or not self._policy.num_probe_tokens:
            return 0
        turn = TurnStart(
            path=self._path,
            position=position,
            previous_role=previous_role,
            num_slots=self._budget.num_left,
        )
        return self._policy.num_probe_tokens if self._policy.asks_at(turn) else 0

    def decide(
        self, position: int, baseline: float, entropies: Sequence[float]
    ) -> Sequence[ForkBudget]:
        """Decide how many forks to make at a position, and take them from the budget.

        Args:
            position: Number of response tokens before the fork.
            baseline: Baseline entropy of the root, nats.
            entropies: Entropies of the tokens sampled after the position, nats.

        Returns:
            The budget of each fork to make; empty if there is none.
        """
        point = ForkPoint(
            path=self._path,
            num_slots=self._budget.num_left,
            baseline=baseline,
            probe_entropies=entropies,
            num_consecutive_forks=self.num_consecutive_forks,
        )
        num_forks = min(self._policy.num_forks(point), self._budget.num_left)
        self.decisions.append(
            BranchDecision(
                path=point.path,
                position=position,
                num_slots_left=point.num_slots,
                baseline_entropy=baseline,
                probe_entropies=tuple(entropies),
                num_forks=num_forks,
                probability=self._policy.probability(point),
                threshold=self._policy.threshold,
            )
        )
        self.num_consecutive_forks = self.num_consecutive_forks + 1 if num_forks > 0 else 0
        # No await in between: another task may share the budget.
        return self._budget.spend(num_forks) if num_forks > 0 else ()


async def fork_sessions(
    session: ToolSession, user: InteractionSession | None, name: str
) -> tuple[
    ToolSession | RuntimeError | OSError, InteractionSession | RuntimeError | OSError | None
]:
    """Copy tools and user for a fork of trajectory `name`; errors are returned, not raised."""
    tools = await _fork_or_error(session.fork(), name)
    if user is None:
        return tools, None
    try:
        return tools, await _fork_or_error(user.fork(), name)
    except BaseException:
        # No other code holds the copy of the tools yet.
        if not isinstance(tools, INFRA_ERRORS):
            with suppress(*INFRA_ERRORS):
                await tools.release()
        raise


async def _fork_or_error[ResultT](
    fork: Awaitable[ResultT], name: str
) -> ResultT | RuntimeError | OSError:
    try:
        return await fork
    except INFRA_ERRORS as error:
        _log.warning("%s: fork failed: %s", name, error)
        return error

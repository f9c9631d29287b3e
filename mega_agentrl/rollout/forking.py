"""Where a path forks and what a fork takes along.

`Forks` asks the branch policy, pays for what it says and keeps every decision, "no" included.
`copy_of` copies tools and user for one fork; what cannot be copied is replaced by its fault, so
that the fork alone fails. Starting the fork is the trajectory's business.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from mega_agentrl.rollout.branching import ForkPoint
from mega_agentrl.rollout.context import FAULTS
from mega_agentrl.types.records import Decision

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from mega_agentrl.rollout.branching import BranchPolicy, ForkBudget
    from mega_agentrl.types.ports import ToolSession, UserSession

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class Forks:
    """The forks of one path. streak: decisions in a row, up to here, that forked."""

    def __init__(
        self, policy: BranchPolicy, path: tuple[int, ...], slots: ForkBudget, streak: int
    ) -> None:
        self.streak = streak
        self.decisions: list[Decision] = []
        self._policy = policy
        self._path = path
        self._slots = slots

    @property
    def left(self) -> int:
        """Forks the path may still make."""
        return self._slots.left

    def ask(self, at: int, baseline: float, entropies: Sequence[float]) -> Sequence[ForkBudget]:
        """The budgets of the forks to make behind token `at`, paid for; empty for none.

        entropies: of the tokens sampled behind it.
        """
        point = ForkPoint(
            path=self._path,
            slots=self._slots.left,
            baseline=baseline,
            probe_entropies=entropies,
            streak=self.streak,
        )
        num_forks = min(self._policy.num_forks(point), self._slots.left)
        self.decisions.append(
            Decision(
                path=point.path,
                at=at,
                slots=point.slots,
                baseline=baseline,
                probe_entropies=tuple(entropies),
                num_forks=num_forks,
                probability=self._policy.probability(point),
                threshold=self._policy.threshold,
            )
        )
        self.streak = self.streak + 1 if num_forks > 0 else 0
        # Paid before anybody else can run: a pool is shared.
        return self._slots.pay(num_forks) if num_forks > 0 else ()


async def copy_of(
    session: ToolSession, user: UserSession | None, name: str
) -> tuple[ToolSession | RuntimeError | OSError, UserSession | RuntimeError | OSError | None]:
    """Tools and user of a fork of the trajectory `name`; a fault for what could not be copied."""
    tools = await _forked(session.fork(), name)
    if user is None:
        return tools, None
    try:
        return tools, await _forked(user.fork(), name)
    except BaseException:
        # Nobody else knows of it yet.
        if not isinstance(tools, FAULTS):
            with suppress(*FAULTS):
                await tools.release()
        raise


async def _forked(fork: Awaitable[ResultT], name: str) -> ResultT | RuntimeError | OSError:
    try:
        return await fork
    except FAULTS as error:
        _log.warning("%s: fork failed: %s", name, error)
        return error

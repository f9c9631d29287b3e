"""What a tool session raises when it, and not the policy, failed outside of a call.

A fault carries a typed outcome, as a failed call does, so that the trajectory which ends by it
says which tool failed at what, and the metrics count it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.records import ToolOutcome


class ToolFault(RuntimeError):
    """One step of a tool's life (`create`, `fork`, `calc_reward`, `release`) failed."""

    def __init__(self, outcome: ToolOutcome) -> None:
        super().__init__(f"tool {outcome.tool}: {outcome.answer}")
        self.outcome = outcome

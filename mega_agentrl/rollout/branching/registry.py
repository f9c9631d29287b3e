"""Selection of the branch policy from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from mega_agentrl.config.enums import Branching
from mega_agentrl.rollout.branching.aepo import AepoBranching
from mega_agentrl.rollout.branching.policy import ArpoBranching, BranchPolicy, NoBranching

if TYPE_CHECKING:
    from mega_agentrl.config.schema import RolloutConfig


def make_branch_policy(config: RolloutConfig) -> BranchPolicy:
    """Return the configured branch policy.

    `released` branches in lock-step without a policy (see `lockstep_arpo`).
    """
    match config.branching:
        case Branching.none | Branching.released:
            return NoBranching()
        case Branching.after_result:
            return ArpoBranching(config.branch)
        case Branching.aepo:
            return AepoBranching(config.branch)
        case _:
            assert_never(config.branching)

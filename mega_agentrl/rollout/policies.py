"""The branch policy by the name the configuration gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from mega_agentrl.config.choices import Branching
from mega_agentrl.rollout.aepo import Aepo
from mega_agentrl.rollout.branching import AfterResult, BranchPolicy, NoBranching

if TYPE_CHECKING:
    from mega_agentrl.config.schema import RolloutConfig


def make_policy(config: RolloutConfig) -> BranchPolicy:
    """The policy the configuration names.

    `released` goes in rounds of its own (see `released`); its trajectories ask nobody.
    """
    match config.branching:
        case Branching.none | Branching.released:
            return NoBranching()
        case Branching.after_result:
            return AfterResult(config.branch)
        case Branching.aepo:
            return Aepo(config.branch)
        case _:
            assert_never(config.branching)

"""Conditions of rollouts that are ahead of the step that learns (`rollout.staleness`).

Part of `check.check`. What would break the bound, or a promise of another setting, is an error.
Without `algo.correction` the objective takes tokens of older weights for its own, which is a
`UserWarning`: for one step it may be meant, and a cure is one key away.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import Correction

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


def check_staleness(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that `config` breaks."""
    staleness = config.rollout.staleness
    if not staleness:
        return
    if config.rollout.carry_over:
        raise ValueError(
            f"rollout.carry_over=True: expected False with rollout.staleness={staleness}, which "
            "bounds the age of what is trained on, as carry_over does not; probable cause: both "
            "ways not to wait for stragglers were asked for"
        )
    if config.deterministic and staleness > 1:
        raise ValueError(
            f"deterministic=True: expected rollout.staleness=1 or 0, got {staleness}: which "
            "weights sample a token depends on timing then; probable cause: a check with the "
            "settings of another run"
        )
    if config.algo.correction is Correction.none:
        warnings.warn(
            f"algo.correction=none with rollout.staleness={staleness}: tokens of older weights are "
            "trained on without importance weights; algo.correction=token_truncate gives them",
            stacklevel=3,
        )

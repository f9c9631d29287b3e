"""Check asynchronous rollouts (`rollout.max_staleness`).

Settings that would violate the staleness bound or another guarantee are errors. Training on stale
tokens without `algo.rollout_correction` is a `UserWarning`, because it may be intended.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import RolloutCorrection

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


def check_staleness(config: TrainConfig) -> None:
    """Raise a `ValueError` for the first condition that `config` violates."""
    staleness = config.rollout.max_staleness
    if not staleness:
        return
    if config.rollout.partial_rollout:
        raise ValueError(
            "rollout.partial_rollout=True: expected False with "
            f"rollout.max_staleness={staleness}, because partial rollouts do not bound the age of "
            "trained tokens; probable cause: both ways to avoid waiting for stragglers were set"
        )
    if config.deterministic and staleness > 1:
        raise ValueError(
            f"deterministic=True: expected rollout.max_staleness=1 or 0, got {staleness}: the "
            "weights that sample a token would depend on timing; probable cause: settings of "
            "another run"
        )
    if config.algo.rollout_correction is RolloutCorrection.none:
        warnings.warn(
            f"algo.rollout_correction=none with rollout.max_staleness={staleness}: tokens of older "
            "weights are trained on without importance weights, which "
            "algo.rollout_correction=token_truncate adds",
            stacklevel=3,
        )

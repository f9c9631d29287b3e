"""Inputs and results of advantage estimators, and the registry that `algo.advantage` selects from.

Shape suffixes: B rows, A trajectories, T response positions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

from mega_agentrl.algo.masking import masked_sum
from mega_agentrl.config.algorithm_traits import ESTIMATORS, EstimatorTraits
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.train import estimators

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.trajectory_rows import TrajectoryRows
    from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The inputs of an advantage estimator."""

    batch: TrainBatch
    """A batch with rewards, log-probs and entropies, and with a critic also values."""
    rows: TrajectoryRows
    """The trajectories of the batch."""
    kl_BT: torch.Tensor | None = None
    """[B, T] KL to the reference in nats, 0 on untrained tokens; None unless it is in the reward.
    """
    kl_coef: float = 0.0
    """Current weight of a KL in the reward."""

    @property
    def group_A(self) -> torch.Tensor:
        """[A] group of each trajectory."""
        return self.batch.group_B[self.rows.first_row_A]

    @property
    def reward_A(self) -> torch.Tensor:
        """[A] reward of each trajectory, minus the weighted KL of all its tokens."""
        reward_A = self.batch.reward_B[self.rows.first_row_A]
        if self.kl_BT is None:
            return reward_A
        kl_A = self.rows.sum_rows(masked_sum(self.kl_BT, self.batch.mask_BT, 1))
        return reward_A - self.kl_coef * kl_A


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a batch."""

    advantage: torch.Tensor
    """[A], one per trajectory, or [B, T], one per token, ignored on untrained tokens."""
    return_BT: torch.Tensor | None = None
    """[B, T] float32 targets of the critic."""


AdvantageFunction = Callable[..., AdvantageResult]
"""A function of `AdvantageInputs`, `AlgoConfig` and its options."""

_REGISTERED: dict[str, AdvantageFunction] = {}


def register_advantage(
    name: str, **traits: bool
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register the decorated function as the estimator `name` with traits of `EstimatorTraits`."""
    EstimatorTraits(**traits)  # raises a TypeError for an unknown trait

    def register(function: AdvantageFunction) -> AdvantageFunction:
        _REGISTERED[name] = function
        return function

    return register


def find_advantage(algo: AlgoConfig) -> AdvantageFunction:
    """Return the estimator of `algo.advantage`; a user's file is imported on the first call."""
    if algo.has_user_advantage:
        return load_user_advantage(algo.advantage)
    _import_estimators()
    return _REGISTERED[algo.advantage]


@cache
def _import_estimators() -> None:
    """Import the modules of this package, whose estimators register themselves."""
    for module in pkgutil.iter_modules(estimators.__path__, f"{estimators.__name__}."):
        importlib.import_module(module.name)


@cache
def load_user_advantage(reference: str) -> AdvantageFunction:
    """Load a user's function, `algo.advantage=/folder/file.py:function`.

    It runs on the driver, in the process of the training loop.

    Raises:
        ConfigError: There is no such function.
    """
    key, expected = ESTIMATORS.key, ESTIMATORS.expected
    function = load_user_object(reference, key, expected, default_name=ESTIMATORS.default_name)
    if not callable(function):
        raise ConfigError(key, reference, expected, f"got {function!r}")
    return cast("AdvantageFunction", function)

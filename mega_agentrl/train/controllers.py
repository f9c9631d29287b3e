"""State of the algorithm that lasts across steps: ARES, mastered prompts, the KL weight.

`Controllers` is one immutable value: a step takes it and returns the next one, and checkpoints
store it. It is updated from training rollouts only. The update of ARES is in `ares.shaping`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo import kl
from mega_agentrl.algo.ares.state import AresState
from mega_agentrl.algo.kl import AdaptiveKL
from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.config.enums import KlPlacement

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

KL_HORIZON_SAMPLES = 10_000
"""Trajectories in which the KL coefficient changes by 20 % at most.

The value of Ziegler et al. (arXiv 1909.08593), verl and OpenRLHF, which all count samples.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """All controller states of a run."""

    ares: AresState = field(default_factory=AresState)
    mastery: MasteryState = field(default_factory=MasteryState)
    adaptive_kl: AdaptiveKL | None = None
    """State of the adaptive KL weight; None if `algo.kl_coef` is the weight throughout."""

    def kl_coef(self, algo: AlgoConfig) -> float:
        """Return the current weight of the KL term."""
        return algo.kl_coef if self.adaptive_kl is None else self.adaptive_kl.coef


def initial_controllers(algo: AlgoConfig) -> Controllers:
    """Return the controllers at the start of a run, before a bootstrap pass."""
    if algo.kl_target is None:
        return Controllers()
    adaptive = AdaptiveKL(coef=algo.kl_coef, target=algo.kl_target, horizon=KL_HORIZON_SAMPLES)
    return Controllers(adaptive_kl=adaptive)


def update_kl(controllers: Controllers, ref_kl_mean: float, num_samples: int) -> Controllers:
    """Advance the adaptive KL weight by an update's mean KL to the reference.

    Args:
        controllers: State before the update.
        ref_kl_mean: Measured KL in nats per token. If it is not finite, as after a skipped step,
            the state stays as it is.
        num_samples: Trajectories that were trained on.
    """
    if controllers.adaptive_kl is None or not isfinite(ref_kl_mean):
        return controllers
    return replace(
        controllers,
        adaptive_kl=kl.update(controllers.adaptive_kl, ref_kl_mean, num_samples),
    )


def adaptive_kl_weights(
    controllers: Controllers, algo: AlgoConfig, batch: TrainBatch
) -> torch.Tensor | None:
    """Return the weight of the loss's KL term, [B, T] float32, if it is adaptive.

    None means `algo.kl_coef`.
    """
    if controllers.adaptive_kl is None or algo.kl_placement is not KlPlacement.loss:
        return None
    return torch.full(batch.mask_BT.shape, controllers.adaptive_kl.coef, dtype=torch.float32)

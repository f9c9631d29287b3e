"""Controllers of ARES's released code, to repeat published runs and for comparison.

Targets and alphas: the target of a bucket is the batch's mean HWE count, rounded half to even, and
alpha moves by `alpha_rate` times the mean minus that target (the opposite for hard). The difference
is at most one half and has no direction, so alpha only follows rounding noise.

KL, by bucket: the measured mean goes into an EMA (decay .97); with e = ema / .01 - 1, if |e| >= .02
and only in every `interval`-th call,

    error = .97 error + .03 e,    log beta += .05 clip(error, -.2, .2),    beta in [1e-4, 100].

At the released interval of 100 calls, beta is practically constant.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from mega_agentrl.algo.ares.reward import DIFFICULTY_NAMES, HARD
from mega_agentrl.algo.ares.state import bucket_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from mega_agentrl.algo.ares.state import (
        AresHyperparams,
        AresState,
        AresStats,
        PerDifficulty,
        ReleasedKLController,
    )

KL_TARGET = 0.01
KL_DECAY = 0.97
KL_RATE = 0.05
KL_CLIP = 0.2
KL_DEAD_ZONE = 0.02
KL_INTERVAL = 100
BETA_MIN, BETA_MAX = 1e-4, 100.0


def update_buckets(
    state: AresState, stats: AresStats, code_B: torch.Tensor, hyperparams: AresHyperparams
) -> AresState:
    """Return the state with the released targets, alphas and KL weights.

    Args:
        state: state before the batch.
        stats: statistics of the batch.
        code_B: [B] difficulty of each trajectory in the batch.
        hyperparams: `alpha_rate`, `alpha_max` and `kl_coef` are used.
    """
    targets, alphas = list(state.targets), list(state.alphas)
    group_B = stats.group_B()
    measured: dict[int, float] = {}
    for code in range(len(DIFFICULTY_NAMES)):
        groups = sorted(set(group_B[code_B == code].tolist()))
        means = [bucket_mean(stats.hwe_B, group_B == group) or 0.0 for group in groups]
        if means:
            mean = sum(means) / len(means)
            target = float(round(mean))
            delta = target - mean if code == HARD else mean - target
            targets[code] = target
            alphas[code] = min(
                max(alphas[code] + hyperparams.alpha_rate * delta, 0.0), hyperparams.alpha_max
            )
        kl = None if stats.kl_B is None else bucket_mean(stats.kl_B, code_B == code)
        if kl is not None:
            measured[code] = kl
    controller = update_kl(state.released_kl, measured)
    return replace(
        state,
        targets=cast("tuple[float | None, float | None, float | None]", tuple(targets)),
        alphas=_as_per_difficulty(alphas),
        betas=_as_per_difficulty([hyperparams.kl_coef * beta for beta in controller.betas]),
        released_kl=controller,
    )


def update_kl(
    controller: ReleasedKLController, measured: Mapping[int, float], *, interval: int = KL_INTERVAL
) -> ReleasedKLController:
    """Return the controller after one more batch.

    Args:
        controller: controller before the batch.
        measured: mean KL in nats of the buckets in the batch, by difficulty code.
        interval: betas change in every `interval`-th call only.
    """
    num_updates = controller.num_updates + 1
    means, errors = list(controller.kl_means), list(controller.errors)
    betas = list(controller.betas)
    for code, kl in measured.items():
        previous = means[code]
        mean = kl if previous is None else KL_DECAY * previous + (1 - KL_DECAY) * kl
        means[code] = mean
        error = mean / KL_TARGET - 1
        if num_updates % interval or abs(error) < KL_DEAD_ZONE:
            continue
        errors[code] = KL_DECAY * errors[code] + (1 - KL_DECAY) * error
        step = KL_RATE * min(max(errors[code], -KL_CLIP), KL_CLIP)
        betas[code] = min(max(betas[code] * math.exp(step), BETA_MIN), BETA_MAX)
    return replace(
        controller,
        betas=_as_per_difficulty(betas),
        kl_means=cast("tuple[float | None, float | None, float | None]", tuple(means)),
        errors=_as_per_difficulty(errors),
        num_updates=num_updates,
    )


def _as_per_difficulty(values: Sequence[float]) -> PerDifficulty:
    easy, medium, hard = values
    return easy, medium, hard

"""ARES as its published code runs it, for repeating published runs and for comparison.

Targets and alphas: the target of a bucket is the batch's mean HWE count, rounded half to even,
and alpha moves by `alpha_rate` times the mean minus that target (the other way round for hard).
The difference is at most one half and has no direction: alpha moves by rounding noise.

KL, by bucket: the measured mean goes into an EMA (.97); with e = ema / .01 - 1, where |e| >= .02
and in every `interval`-th call only,

    error = .97 error + .03 e,    log beta += .05 clip(error, -.2, .2),    beta in [1e-4, 100].

At the published interval of 100 calls beta is as good as constant.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from mega_agentrl.algo.ares_reward import HARD, NAMES
from mega_agentrl.algo.ares_state import bucket_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from mega_agentrl.algo.ares_state import AresRules, AresState, AresStats, Buckets, ReleasedKl

KL_TARGET = 0.01
KL_DECAY = 0.97
KL_RATE = 0.05
KL_CLIP = 0.2
KL_DEAD_ZONE = 0.02
KL_INTERVAL = 100
BETA_MIN, BETA_MAX = 1e-4, 100.0


def update_buckets(
    state: AresState, stats: AresStats, code_B: torch.Tensor, rules: AresRules
) -> AresState:
    """The state with the released targets, alphas and KL weights.

    code_B: [B] difficulty of each trajectory in this batch.
    """
    targets, alphas = list(state.targets), list(state.alphas)
    group_B = stats.group_B()
    measured: dict[int, float] = {}
    for code in range(len(NAMES)):
        groups = sorted(set(group_B[code_B == code].tolist()))
        means = [bucket_mean(stats.hwe_B, group_B == group) or 0.0 for group in groups]
        if means:
            mean = sum(means) / len(means)
            target = float(round(mean))
            delta = target - mean if code == HARD else mean - target
            targets[code] = target
            alphas[code] = min(max(alphas[code] + rules.alpha_rate * delta, 0.0), rules.alpha_max)
        kl = None if stats.kl_B is None else bucket_mean(stats.kl_B, code_B == code)
        if kl is not None:
            measured[code] = kl
    controller = update_kl(state.released_kl, measured)
    return replace(
        state,
        targets=cast("tuple[float | None, float | None, float | None]", tuple(targets)),
        alphas=_three(alphas),
        betas=_three([rules.kl_coef * beta for beta in controller.betas]),
        released_kl=controller,
    )


def update_kl(
    controller: ReleasedKl, measured: Mapping[int, float], *, interval: int = KL_INTERVAL
) -> ReleasedKl:
    """The controller after one more batch. measured: mean KL in nats of the buckets in it."""
    num_updates = controller.num_updates + 1
    means, errors = list(controller.kl_means), list(controller.errors)
    betas = list(controller.betas)
    for code, kl in measured.items():
        before = means[code]
        mean = kl if before is None else KL_DECAY * before + (1 - KL_DECAY) * kl
        means[code] = mean
        error = mean / KL_TARGET - 1
        if num_updates % interval or abs(error) < KL_DEAD_ZONE:
            continue
        errors[code] = KL_DECAY * errors[code] + (1 - KL_DECAY) * error
        step = KL_RATE * min(max(errors[code], -KL_CLIP), KL_CLIP)
        betas[code] = min(max(betas[code] * math.exp(step), BETA_MIN), BETA_MAX)
    return replace(
        controller,
        betas=_three(betas),
        kl_means=cast("tuple[float | None, float | None, float | None]", tuple(means)),
        errors=_three(errors),
        num_updates=num_updates,
    )


def _three(values: Sequence[float]) -> Buckets:
    easy, medium, hard = values
    return easy, medium, hard

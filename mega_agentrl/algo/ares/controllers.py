"""Controllers of ARES (arXiv 2510.08457): targets, strengths and KL weights across steps.

`update` computes the next state from the statistics of a step, per difficulty bucket d (easy,
medium, hard):

    threshold   EMA, decay .99, of the median over trajectories of their 95th percentiles
    target_d    EMA, rate .1, of the mean HWE count of the correct trajectories
    alpha_d     += .05 (mean - target_d) / max(target_d, 1), negated for hard, within [0, 2];
                mean: HWE count of all trajectories of d, target_d: from before the step
    lambda_d    max(0, lambda_d + .1 (KL_d - eps_d))
    beta_d      kl_coef + lambda_d

So alpha grows if the answers to easy and medium prompts have more high-entropy windows (HWEs) than
correct answers have, or the answers to hard prompts fewer. The first batch only initializes targets
and threshold. A bucket with fewer than 8 trajectories keeps its controllers, and a bucket with
fewer than 8 measured KLs keeps its lambda.

The hyperparameters named `released` select the controllers of ARES's released code, to repeat
published runs and for comparison. There, the target of a bucket is the batch's mean HWE count,
rounded half to even, and alpha moves by `alpha_rate` times the mean minus that target (the opposite
for hard). The difference is at most one half and has no direction, so alpha only follows rounding
noise. The KL weight of a bucket is kl_coef beta. The measured mean KL goes into an EMA (decay .97);
with e = ema / .01 - 1, if |e| >= .02 and only in every `interval`-th call,

    error = .97 error + .03 e,    log beta += .05 clip(error, -.2, .2),    beta in [1e-4, 100].

At the released interval of 100 calls, beta is practically constant.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.algo.ares.reward import DIFFICULTY_NAMES, HARD, difficulty
from mega_agentrl.algo.ares.state import PAPER_HYPERPARAMS, bucket_mean
from mega_agentrl.algo.shape_checks import check_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from mega_agentrl.algo.ares.state import (
        AresHyperparams,
        AresState,
        AresStats,
        ReleasedKLController,
    )


# Constants of `update_released_kl`, by the names of the module's docstring.
RELEASED_KL_TARGET = 0.01
RELEASED_KL_DECAY = 0.97
RELEASED_KL_RATE = 0.05
RELEASED_KL_CLIP = 0.2
RELEASED_KL_DEAD_ZONE = 0.02
RELEASED_KL_INTERVAL = 100
RELEASED_BETA_MIN, RELEASED_BETA_MAX = 1e-4, 100.0


def update(
    state: AresState, stats: AresStats, hyperparams: AresHyperparams = PAPER_HYPERPARAMS
) -> AresState:
    """Return the state after a training step.

    Args:
        state: state before the step.
        stats: statistics of the step's training rollouts, without validation.
        hyperparams: constants of the controllers; `released` selects the released ones.
    """
    code_B = difficulty(stats.correct_B, stats.group_B())
    new_codes = dict(zip(stats.prompt_ids, code_B.tolist(), strict=True))
    state = replace(state, difficulty_by_prompt={**state.difficulty_by_prompt, **new_codes})
    state = update_threshold(state, stats.p95_B, decay=hyperparams.threshold_decay)
    if hyperparams.name == "released":
        return _update_released_buckets(state, stats, code_B, hyperparams)
    for code in range(len(DIFFICULTY_NAMES)):
        in_bucket_B = code_B == code
        if int(in_bucket_B.sum()) >= hyperparams.min_trajectories:
            state = _update_bucket(state, stats, code, in_bucket_B, hyperparams)
    easy, medium, hard = (hyperparams.kl_coef + value for value in state.lambdas)
    return replace(state, betas=(easy, medium, hard))


def update_threshold(
    state: AresState, p95_B: torch.Tensor, *, decay: float = PAPER_HYPERPARAMS.threshold_decay
) -> AresState:
    """Return the state with the batch's median percentile in its threshold EMA.

    The first batch sets the threshold; a second call with the same batch then changes nothing, so a
    caller that needs a threshold before `update` may call this first.

    Args:
        state: state before the batch.
        p95_B: [B] 95th percentiles in nats, from `threshold_p95`; NaN is ignored, and if all are
            NaN the state does not change.
        decay: decay of the EMA.
    """
    check_rank(p95_B=p95_B)
    p95_N = p95_B[p95_B.isfinite()].double()
    if not len(p95_N):
        return state
    median = float(p95_N.quantile(0.5))
    previous = median if state.threshold is None else state.threshold
    return replace(state, threshold=decay * previous + (1 - decay) * median)


def _update_bucket(
    state: AresState,
    stats: AresStats,
    code: int,
    in_bucket_B: torch.Tensor,
    hyperparams: AresHyperparams,
) -> AresState:
    """Apply the paper's rule to one bucket that has enough trajectories."""
    target, alpha = state.targets[code], state.alphas[code]
    mean = bucket_mean(stats.hwe_B, in_bucket_B)
    if target is not None and mean is not None:
        excess = (mean - target) / max(target, 1.0)
        step = hyperparams.alpha_rate * (-excess if code == HARD else excess)
        alpha = min(max(alpha + step, 0.0), hyperparams.alpha_max)
    correct_mean = bucket_mean(stats.hwe_B, in_bucket_B & stats.correct_B.bool())
    if correct_mean is not None:
        previous = correct_mean if target is None else target
        target = (1 - hyperparams.target_rate) * previous + hyperparams.target_rate * correct_mean
    kl = None if stats.kl_B is None else _mean_kl(stats.kl_B[in_bucket_B], hyperparams)
    lambda_ = state.lambdas[code]
    if kl is not None:
        lambda_ = max(0.0, lambda_ + hyperparams.lambda_rate * (kl - hyperparams.kl_budget[code]))
    return replace(
        state,
        targets=_replace_bucket(state.targets, code, target),
        alphas=_replace_bucket(state.alphas, code, alpha),
        lambdas=_replace_bucket(state.lambdas, code, lambda_),
    )


def _mean_kl(kl_N: torch.Tensor, hyperparams: AresHyperparams) -> float | None:
    """Return the mean of the measured KLs; None if fewer than `min_trajectories` were measured."""
    is_measured_N = kl_N.isfinite()
    if int(is_measured_N.sum()) < hyperparams.min_trajectories:
        return None
    return bucket_mean(kl_N, is_measured_N)


def _update_released_buckets(
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
    kl_by_code: dict[int, float] = {}
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
            kl_by_code[code] = kl
    controller = update_released_kl(state.released_kl, kl_by_code)
    return replace(
        state,
        targets=_as_triple(targets),
        alphas=_as_triple(alphas),
        betas=_as_triple([hyperparams.kl_coef * beta for beta in controller.betas]),
        released_kl=controller,
    )


def update_released_kl(
    controller: ReleasedKLController,
    kl_by_code: Mapping[int, float],
    *,
    interval: int = RELEASED_KL_INTERVAL,
) -> ReleasedKLController:
    """Return the controller after one more batch.

    Args:
        controller: controller before the batch.
        kl_by_code: mean KL of the buckets in the batch in nats per token, by difficulty code.
        interval: betas change in every `interval`-th call only.
    """
    num_updates = controller.num_updates + 1
    means, errors = list(controller.kl_means), list(controller.errors)
    betas = list(controller.betas)
    for code, kl in kl_by_code.items():
        previous, mean = means[code], kl
        if previous is not None:
            mean = RELEASED_KL_DECAY * previous + (1 - RELEASED_KL_DECAY) * kl
        means[code] = mean
        error = mean / RELEASED_KL_TARGET - 1
        if num_updates % interval or abs(error) < RELEASED_KL_DEAD_ZONE:
            continue
        errors[code] = RELEASED_KL_DECAY * errors[code] + (1 - RELEASED_KL_DECAY) * error
        step = RELEASED_KL_RATE * min(max(errors[code], -RELEASED_KL_CLIP), RELEASED_KL_CLIP)
        betas[code] = min(max(betas[code] * math.exp(step), RELEASED_BETA_MIN), RELEASED_BETA_MAX)
    return replace(
        controller,
        betas=_as_triple(betas),
        kl_means=_as_triple(means),
        errors=_as_triple(errors),
        num_updates=num_updates,
    )


def _replace_bucket[ValueT](
    by_code: tuple[ValueT, ValueT, ValueT], code: int, value: ValueT
) -> tuple[ValueT, ValueT, ValueT]:
    """Return the values by difficulty code with the value of one code replaced."""
    return _as_triple([*by_code[:code], value, *by_code[code + 1 :]])


def _as_triple[ValueT](values: Sequence[ValueT]) -> tuple[ValueT, ValueT, ValueT]:
    easy, medium, hard = values
    return easy, medium, hard

"""ARES (arXiv 2510.08457): adaptive reward shaping and KL weights from high-entropy windows.

This package re-exports the functions of the method and defines the controllers' step. A training
step shapes rewards and weighs the KL term with the state from before it; then `update` computes the
next state from the training rollouts, per difficulty bucket d (easy, medium, hard):

    threshold   EMA, decay .99, of the median over trajectories of their 95th percentiles
    target_d    EMA, rate .1, of the mean HWE count of the correct trajectories
    alpha_d     += .05 (mean - target_d) / max(target_d, 1), negated for hard, within [0, 2];
                mean: HWE count of all trajectories of d, target_d: from before the step
    lambda_d    max(0, lambda_d + .1 (KL_d - eps_d))
    beta_d      kl_coef + lambda_d

So alpha grows if easy and medium prompts are answered with more high-entropy windows than in
correct answers, and hard ones with fewer. The first batch only initializes targets and threshold. A
bucket with fewer than 8 trajectories keeps its controllers, and one with fewer than 8 measured KLs
its lambda. With the hyperparameters named `released`, `ares.released` updates targets, alphas and
betas.

Filters and the bootstrap pass belong to the training loop; a bootstrap is one `update` with the
statistics of the whole data set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mega_agentrl.algo.ares import released as ares_released
from mega_agentrl.algo.ares.entropy_windows import (
    hwe_count,
    hwe_mask,
    normalize_trigger_token,
    soft_cost,
    threshold_p95,
    window_entropy,
)
from mega_agentrl.algo.ares.reward import (
    DIFFICULTY_NAMES,
    EASY,
    HARD,
    MEDIUM,
    difficulty,
    entropy_reward,
    token_kl_weight,
)
from mega_agentrl.algo.ares.state import (
    UNSEEN,
    AresHyperparams,
    AresState,
    AresStats,
    ReleasedKLController,
    bucket_mean,
    metrics,
)
from mega_agentrl.algo.shape_checks import check_rank

if TYPE_CHECKING:
    import torch

ValueT = TypeVar("ValueT")

__all__ = [
    "DIFFICULTY_NAMES",
    "EASY",
    "HARD",
    "MEDIUM",
    "PAPER_HYPERPARAMS",
    "RELEASED_HYPERPARAMS",
    "UNSEEN",
    "AresHyperparams",
    "AresState",
    "AresStats",
    "ReleasedKLController",
    "difficulty",
    "entropy_reward",
    "hwe_count",
    "hwe_mask",
    "metrics",
    "normalize_trigger_token",
    "soft_cost",
    "threshold_p95",
    "token_kl_weight",
    "update",
    "update_threshold",
    "window_entropy",
]

PAPER_HYPERPARAMS = AresHyperparams()
RELEASED_HYPERPARAMS = AresHyperparams(name="released")


def update(
    state: AresState, stats: AresStats, hyperparams: AresHyperparams = PAPER_HYPERPARAMS
) -> AresState:
    """Return the state after a step with these statistics, which must not include validation."""
    code_B = difficulty(stats.correct_B, stats.group_B())
    difficulty_seen = dict(zip(stats.prompt_ids, code_B.tolist(), strict=True))
    state = replace(state, difficulty_by_prompt={**state.difficulty_by_prompt, **difficulty_seen})
    state = update_threshold(state, stats.p95_B, decay=hyperparams.threshold_decay)
    if hyperparams.name == "released":
        return ares_released.update_buckets(state, stats, code_B, hyperparams)
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
        p95_B: [B] nats, from `threshold_p95`; NaN rows are ignored, and without other rows the
            state does not change.
        decay: decay of the EMA.
    """
    check_rank(p95_B=p95_B)
    known_N = p95_B[p95_B.isfinite()].double()
    if not len(known_N):
        return state
    median = float(known_N.quantile(0.5))
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
    """Return the mean of the measured KLs; None if there are too few."""
    measured_N = kl_N.isfinite()
    if int(measured_N.sum()) < hyperparams.min_trajectories:
        return None
    return bucket_mean(kl_N, measured_N)


def _replace_bucket(
    by_code: tuple[ValueT, ValueT, ValueT], code: int, value: ValueT
) -> tuple[ValueT, ValueT, ValueT]:
    easy, medium, hard = (
        value if index == code else current for index, current in enumerate(by_code)
    )
    return easy, medium, hard

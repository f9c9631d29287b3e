"""ARES (arXiv 2510.08457): its controllers' step, and the names of the whole method.

A step shapes rewards and weighs KL by the state from before it; then `update` makes the next
state from what the training rollouts showed, by bucket of difficulty d (easy, medium, hard):

    threshold   EMA .99 of the median over trajectories of their 95th percentiles
    target_d    EMA, rate .1, of the mean HWE count of the correct trajectories
    alpha_d     += .05 (mean - target_d) / max(target_d, 1), negated for hard, within [0, 2];
                mean: HWE count of all trajectories of d, target_d: from before the step
    lambda_d    max(0, lambda_d + .1 (KL_d - eps_d))
    beta_d      kl_coef + lambda_d

So alpha grows where easy and medium prompts are answered with more hesitation than right answers
show, and hard ones with less. The first batch only starts targets and threshold; a bucket with
fewer than 8 trajectories keeps all its controllers, one with fewer than 8 measured KLs its lambda.
With the rules named `released` targets, alphas and betas follow `ares_released`.

Windows are in `hwe`, shaping in `ares_reward`, the values in `ares_state`: this module offers
their names, so that a reader of the method needs one. Filters and the bootstrap pass are the
loop's; a bootstrap is one `update` with the statistics of the whole data set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mega_agentrl.algo import ares_released
from mega_agentrl.algo.ares_reward import (
    EASY,
    HARD,
    MEDIUM,
    NAMES,
    difficulty,
    entropy_reward,
    token_kl_weight,
)
from mega_agentrl.algo.ares_state import (
    UNKNOWN,
    AresRules,
    AresState,
    AresStats,
    ReleasedKl,
    bucket_mean,
    metrics,
)
from mega_agentrl.algo.hwe import (
    hwe_count,
    hwe_mask,
    soft_cost,
    threshold_p95,
    trigger_word,
    window_entropy,
)
from mega_agentrl.algo.shapes import check_rank

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = [
    "EASY",
    "HARD",
    "MEDIUM",
    "NAMES",
    "PAPER",
    "RELEASED",
    "UNKNOWN",
    "AresRules",
    "AresState",
    "AresStats",
    "ReleasedKl",
    "difficulty",
    "entropy_reward",
    "hwe_count",
    "hwe_mask",
    "metrics",
    "soft_cost",
    "threshold_p95",
    "token_kl_weight",
    "trigger_word",
    "update",
    "update_threshold",
    "window_entropy",
]

PAPER = AresRules()
RELEASED = AresRules(name="released")


def update(state: AresState, stats: AresStats, rules: AresRules = PAPER) -> AresState:
    """The state after a step whose training rollouts showed `stats`; no validation in them."""
    code_B = difficulty(stats.correct_B, stats.group_B())
    seen = dict(zip(stats.prompt_ids, code_B.tolist(), strict=True))
    state = replace(state, difficulty={**state.difficulty, **seen})
    state = update_threshold(state, stats.p95_B, decay=rules.threshold_decay)
    if rules.name == "released":
        return ares_released.update_buckets(state, stats, code_B, rules)
    for code in range(len(NAMES)):
        there_B = code_B == code
        if int(there_B.sum()) >= rules.min_trajectories:
            state = _update_bucket(state, stats, code, there_B, rules)
    easy, medium, hard = (rules.kl_coef + value for value in state.lambdas)
    return replace(state, betas=(easy, medium, hard))


def update_threshold(
    state: AresState, p95_B: torch.Tensor, *, decay: float = PAPER.threshold_decay
) -> AresState:
    """The state with the batch's median in its threshold; the first batch sets it.

    p95_B: [B] of `threshold_p95`, nats; NaN rows have no say, and without others nothing changes.
    A caller that counts windows before there is a threshold calls this first: doing it again with
    the same batch changes nothing.
    """
    check_rank(p95_B=p95_B)
    known_N = p95_B[p95_B.isfinite()].double()
    if not len(known_N):
        return state
    median = float(known_N.quantile(0.5))
    before = median if state.threshold is None else state.threshold
    return replace(state, threshold=decay * before + (1 - decay) * median)


def _update_bucket(
    state: AresState, stats: AresStats, code: int, there_B: torch.Tensor, rules: AresRules
) -> AresState:
    """The paper's rule for one bucket that has enough trajectories."""
    target, alpha = state.targets[code], state.alphas[code]
    mean = bucket_mean(stats.hwe_B, there_B)
    if target is not None and mean is not None:
        excess = (mean - target) / max(target, 1.0)
        step = rules.alpha_rate * (-excess if code == HARD else excess)
        alpha = min(max(alpha + step, 0.0), rules.alpha_max)
    shown = bucket_mean(stats.hwe_B, there_B & stats.correct_B.bool())
    if shown is not None:
        before = shown if target is None else target
        target = (1 - rules.target_rate) * before + rules.target_rate * shown
    kl = None if stats.kl_B is None else _mean_kl(stats.kl_B[there_B], rules)
    held = state.lambdas[code]
    if kl is not None:
        held = max(0.0, held + rules.lambda_rate * (kl - rules.kl_budget[code]))
    return replace(
        state,
        targets=_with(state.targets, code, target),
        alphas=_with(state.alphas, code, alpha),
        lambdas=_with(state.lambdas, code, held),
    )


def _mean_kl(kl_N: torch.Tensor, rules: AresRules) -> float | None:
    """Mean of what was measured, None where that is less than the controllers act upon."""
    measured_N = kl_N.isfinite()
    if int(measured_N.sum()) < rules.min_trajectories:
        return None
    return bucket_mean(kl_N, measured_N)


def _with(by_code: tuple[T, T, T], code: int, value: T) -> tuple[T, T, T]:
    easy, medium, hard = (value if at == code else kept for at, kept in enumerate(by_code))
    return easy, medium, hard

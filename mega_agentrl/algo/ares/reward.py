"""Reward shaping and KL weights of ARES (arXiv 2510.08457).

A trajectory with n high-entropy windows, of a prompt with difficulty d, target T and strength
alpha, has delta = n - T and gets a reward in addition to accuracy, of at most cap = alpha * (1, 1,
1.2). With margin m = max(1, f max(T, 1)), f = (.15, .25, .35), kappa = (2, 3, 4) and temp = (2,
2.5, 3) for easy, medium, hard:

    easy    right  -min(cap, cap huber(delta - m) / (m + kappa))       wrong  .6 cap sat(delta - m)
    medium  right  the same of |delta| - m                             wrong  .8 cap sat(delta - m)
    hard    right  cap sat(delta + m) if delta >= -m, else             wrong     cap sat(delta - m)
                   -min(cap, .5 cap huber(-delta - m) / (m + kappa))

where the argument of huber, and of sat for wrong answers, is clamped below at 0. huber(x) is x^2 /
(2 kappa) up to kappa and x - kappa / 2 beyond. sat(x) is sigmoid(x / temp) in the rule `released`,
which pays every wrong answer half of the cap even without exploration; the rule `centred` uses 2
(sigmoid(x / temp) - 1/2).

Difficulties are 0 easy, 1 medium, 2 hard; other codes, and targets that are NaN because they are
not known yet, get 0. B trajectories, T response positions (in suffixes; the target in formulas).
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import group_index_and_size, group_sum
from mega_agentrl.algo.shape_checks import check_same_rows, check_same_shape

EASY, MEDIUM, HARD = 0, 1, 2
DIFFICULTY_NAMES = ("easy", "medium", "hard")
EASY_MIN_ACCURACY, MEDIUM_MIN_ACCURACY = 2 / 3, 1 / 3
MARGIN_FRACTION = (0.15, 0.25, 0.35)
KAPPA = (2.0, 3.0, 4.0)
SATURATION_TEMPERATURE = (2.0, 2.5, 3.0)
CAP_FACTOR = (1.0, 1.0, 1.2)
WRONG_CAP_FACTOR = (0.6, 0.8, 1.0)
REWARD_RULES = ("released", "centred")


def difficulty(accuracy_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the difficulty by mean accuracy of the group, [B] int64.

    0 for at least 2/3, 1 for at least 1/3, else 2. A group of one is no exception.

    Args:
        accuracy_B: [B] accuracy, 1 for correct.
        group_B: [B] group of each trajectory.
    """
    check_same_shape(accuracy_B=accuracy_B, group_B=group_B)
    index_B, size_B = group_index_and_size(group_B)
    mean_B = group_sum(accuracy_B.double(), index_B) / size_B
    return (mean_B < EASY_MIN_ACCURACY).long() + (mean_B < MEDIUM_MIN_ACCURACY).long()


def entropy_reward(
    correct_B: torch.Tensor,
    hwe_B: torch.Tensor,
    target_B: torch.Tensor,
    alpha_B: torch.Tensor,
    difficulty_B: torch.Tensor,
    *,
    rule: str = "released",
    margin_fraction: tuple[float, float, float] = MARGIN_FRACTION,
) -> torch.Tensor:
    """Return the reward added to accuracy, within +- cap, [B] float32 (float64 if `alpha_B` is).

    Args:
        correct_B: [B] bool or 0/1.
        hwe_B: [B] number of high-entropy windows.
        target_B: [B] target of each trajectory's difficulty.
        alpha_B: [B] strength of each trajectory's difficulty.
        difficulty_B: [B] difficulty code.
        rule: `released` or `centred`.
        margin_fraction: margin around the target as a fraction of it, by difficulty.
    """
    check_same_shape(
        correct_B=correct_B,
        hwe_B=hwe_B,
        target_B=target_B,
        alpha_B=alpha_B,
        difficulty_B=difficulty_B,
    )
    if rule not in REWARD_RULES:
        raise ValueError(f"rule={rule}: expected one of {', '.join(REWARD_RULES)}")
    code_B = difficulty_B.long()
    known_B = (code_B >= EASY) & (code_B <= HARD) & ~target_B.isnan()
    code_B = torch.where(known_B, code_B, EASY)
    delta_B = hwe_B.double() - torch.where(known_B, target_B, 0).double()
    margin_B = margin(
        torch.where(known_B, target_B, 0).double(), _per_difficulty(margin_fraction, code_B)
    )
    cap_B = alpha_B.double() * _per_difficulty(CAP_FACTOR, code_B)
    right_B = _correct_answer_reward(delta_B, margin_B, cap_B, code_B, rule)
    above_B = (delta_B - margin_B).clamp(min=0)
    wrong_B = _per_difficulty(WRONG_CAP_FACTOR, code_B) * cap_B * _saturation(above_B, code_B, rule)
    reward_B = torch.where(correct_B.bool(), right_B, wrong_B)
    reward_B = torch.where(known_B, reward_B, torch.zeros_like(reward_B))
    return reward_B if alpha_B.dtype == torch.float64 else reward_B.float()


def token_kl_weight(
    hwe_mask_BT: torch.Tensor, beta_B: torch.Tensor, *, rho: float = 0.5
) -> torch.Tensor:
    """Return the KL weight: beta * rho inside high-entropy windows, beta elsewhere, [B, T].

    Args:
        hwe_mask_BT: [B, T] result of `hwe_mask`.
        beta_B: [B] beta of each trajectory's difficulty.
        rho: factor inside the windows; below 1 lets the policy explore there.
    """
    check_same_rows(beta_B, hwe_mask_BT)
    beta_B1 = beta_B.unsqueeze(1)
    return torch.where(hwe_mask_BT.bool(), beta_B1 * rho, beta_B1)


def margin(target_B: torch.Tensor, share_B: torch.Tensor | float) -> torch.Tensor:
    """Return the distance that counts as near the target: max(1, share * max(target, 1))."""
    return (share_B * target_B.clamp(min=1)).clamp(min=1)


def huber(x_B: torch.Tensor, kappa_B: torch.Tensor | float) -> torch.Tensor:
    """Return the one-sided Huber function: quadratic up to kappa, linear beyond, 0 below 0."""
    kappa_B = torch.as_tensor(kappa_B, dtype=x_B.dtype, device=x_B.device)
    positive_B = x_B.clamp(min=0)
    quadratic_B = positive_B * positive_B / (2 * kappa_B)
    return torch.where(positive_B <= kappa_B, quadratic_B, positive_B - kappa_B / 2)


def _correct_answer_reward(
    delta_B: torch.Tensor,
    margin_B: torch.Tensor,
    cap_B: torch.Tensor,
    code_B: torch.Tensor,
    rule: str,
) -> torch.Tensor:
    """Return the reward of correct answers: a penalty, or a bonus for explored hard prompts."""
    kappa_B = _per_difficulty(KAPPA, code_B)
    off_B = torch.where(code_B == MEDIUM, delta_B.abs(), delta_B)
    off_B = torch.where(code_B == HARD, -delta_B, off_B) - margin_B
    slope_B = torch.where(code_B == HARD, 0.5 * cap_B, cap_B)
    penalty_B = torch.minimum(cap_B, slope_B * huber(off_B, kappa_B) / (margin_B + kappa_B))
    enough_B = (code_B == HARD) & (delta_B >= -margin_B)
    return torch.where(enough_B, cap_B * _saturation(delta_B + margin_B, code_B, rule), -penalty_B)


def _saturation(x_B: torch.Tensor, code_B: torch.Tensor, rule: str) -> torch.Tensor:
    level_B = torch.sigmoid(x_B / _per_difficulty(SATURATION_TEMPERATURE, code_B))
    return level_B if rule == "released" else 2 * level_B - 1


def _per_difficulty(by_code: tuple[float, float, float], code_B: torch.Tensor) -> torch.Tensor:
    """Return the constant of each trajectory's difficulty, [B] float64."""
    return torch.tensor(by_code, dtype=torch.float64, device=code_B.device)[code_B]

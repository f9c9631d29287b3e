"""Reward shaping and KL weights of ARES (arXiv 2510.08457).

A trajectory gets a shaping reward in addition to accuracy. Let n be its number of high-entropy
windows, T and alpha the target and the strength for its prompt's difficulty, and delta = n - T. For
easy, medium and hard prompts cap = alpha * (1, 1, 1.2), f = (.15, .25, .35), kappa = (2, 3, 4) and
temp = (2, 2.5, 3). With the margin m = max(1, f * max(T, 1)) around the target the reward is

    easy    right  -min(cap, cap huber(delta - m) / (m + kappa))       wrong  .6 cap sat(delta - m)
    medium  right  as easy, with |delta| - m for delta - m             wrong  .8 cap sat(delta - m)
    hard    right  cap sat(delta + m) if delta >= -m, else             wrong     cap sat(delta - m)
                   -min(cap, .5 cap huber(-delta - m) / (m + kappa))

where the argument of huber, and of sat for wrong answers, is clamped below at 0. huber(x) is x^2 /
(2 kappa) up to kappa and x - kappa / 2 beyond. sat(x) is sigmoid(x / temp) in the rule `released`,
which pays every wrong answer at least half of its maximum even without exploration; the rule
`centred` uses 2 (sigmoid(x / temp) - 1/2).

Difficulty codes are 0 easy, 1 medium, 2 hard. The reward is 0 for other codes and for targets that
are not known yet (NaN). In shape suffixes B trajectories, T response positions.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import group_index_and_size, group_sum
from mega_agentrl.algo.shape_checks import check_same_rows, check_same_shape
from mega_agentrl.errors import InputError

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
    """Return the difficulty code of each trajectory's group, [B] int64.

    The code is 0 for a mean accuracy of at least 2/3, 1 for at least 1/3, else 2. This also holds
    for a group of one.

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
        correct_B: [B] bool or 0/1, whether each trajectory is correct.
        hwe_B: [B] number of high-entropy windows.
        target_B: [B] target number of windows for each trajectory's difficulty, NaN if unknown.
        alpha_B: [B] strength of the shaping for each trajectory's difficulty.
        difficulty_B: [B] difficulty code.
        rule: `released` or `centred`.
        margin_fraction: f, the margin as a fraction of the target, by difficulty.

    Raises:
        ValueError: `rule` is unknown.
    """
    check_same_shape(
        correct_B=correct_B,
        hwe_B=hwe_B,
        target_B=target_B,
        alpha_B=alpha_B,
        difficulty_B=difficulty_B,
    )
    if rule not in REWARD_RULES:
        raise InputError("rule", rule, f"one of {', '.join(REWARD_RULES)}")
    code_B = difficulty_B.long()
    has_target_B = (code_B >= EASY) & (code_B <= HARD) & ~target_B.isnan()
    code_B = torch.where(has_target_B, code_B, EASY)
    delta_B = hwe_B.double() - torch.where(has_target_B, target_B, 0).double()
    margin_B = margin(
        torch.where(has_target_B, target_B, 0).double(), _per_difficulty(margin_fraction, code_B)
    )
    cap_B = alpha_B.double() * _per_difficulty(CAP_FACTOR, code_B)
    correct_reward_B = _correct_answer_reward(delta_B, margin_B, cap_B, code_B, rule)
    excess_B = (delta_B - margin_B).clamp(min=0)
    wrong_cap_B = _per_difficulty(WRONG_CAP_FACTOR, code_B) * cap_B
    wrong_reward_B = wrong_cap_B * _saturation(excess_B, code_B, rule)
    reward_B = torch.where(correct_B.bool(), correct_reward_B, wrong_reward_B)
    reward_B = torch.where(has_target_B, reward_B, torch.zeros_like(reward_B))
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


def margin(target_B: torch.Tensor, fraction_B: torch.Tensor | float) -> torch.Tensor:
    """Return the margin around the target, max(1, fraction * max(target, 1)), [B]."""
    return (fraction_B * target_B.clamp(min=1)).clamp(min=1)


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
    """Return the reward of correct answers, [B].

    It is a penalty, except for hard prompts with enough windows, where it is a bonus.
    """
    kappa_B = _per_difficulty(KAPPA, code_B)
    deviation_B = torch.where(code_B == MEDIUM, delta_B.abs(), delta_B)
    deviation_B = torch.where(code_B == HARD, -delta_B, deviation_B) - margin_B
    slope_B = torch.where(code_B == HARD, 0.5 * cap_B, cap_B)
    penalty_B = torch.minimum(cap_B, slope_B * huber(deviation_B, kappa_B) / (margin_B + kappa_B))
    has_bonus_B = (code_B == HARD) & (delta_B >= -margin_B)
    bonus_B = cap_B * _saturation(delta_B + margin_B, code_B, rule)
    return torch.where(has_bonus_B, bonus_B, -penalty_B)


def _saturation(x_B: torch.Tensor, code_B: torch.Tensor, rule: str) -> torch.Tensor:
    """Return sat(x) of the module's docstring, [B]."""
    level_B = torch.sigmoid(x_B / _per_difficulty(SATURATION_TEMPERATURE, code_B))
    return level_B if rule == "released" else 2 * level_B - 1


def _per_difficulty(by_code: tuple[float, float, float], code_B: torch.Tensor) -> torch.Tensor:
    """Return the constant of each trajectory's difficulty, [B] float64."""
    return torch.tensor(by_code, dtype=torch.float64, device=code_B.device)[code_B]

"""State, hyperparameters and statistics of ARES's controllers (arXiv 2510.08457).

`ares.update` computes the next state from these three. A difficulty bucket holds the prompts of one
difficulty. The codes are 0 easy, 1 medium and 2 hard everywhere; -1 stands for a prompt that was
never visited. HWE: high-entropy window. B trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mega_agentrl.algo.ares.entropy_windows import WINDOW_TOKENS
from mega_agentrl.algo.ares.reward import DIFFICULTY_NAMES, MARGIN_FRACTION
from mega_agentrl.algo.shape_checks import check_rank, check_same_shape
from mega_agentrl.errors import InputError

UNSEEN = -1
RULE_NAMES = ("paper", "released")

PerDifficulty = tuple[float, float, float]
OptionalPerDifficulty = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AresHyperparams:
    """Constants of reward shaping, KL weights and controllers."""

    name: str = "paper"
    """`paper`, or `released` for the rule of the released code, which uses only `kl_coef`,
    `window`, `margin_fraction`, `alpha_rate`, `alpha_max` and `threshold_decay`.
    """
    window: int = WINDOW_TOKENS
    """Number of tokens in a window."""
    margin_fraction: PerDifficulty = MARGIN_FRACTION
    """Margin around the target, as a fraction of it, by bucket."""
    kl_window_factor: float = 0.5
    """Factor rho on the KL weight inside high-entropy windows."""
    kl_coef: float = 0.01
    """Weight of the KL term while lambda is 0."""
    alpha_rate: float = 0.05
    """Step size of alpha."""
    alpha_max: float = 2.0
    """Upper bound of alpha."""
    threshold_decay: float = 0.99
    """Decay of the threshold's EMA."""
    target_rate: float = 0.1
    """Rate of the targets' EMA."""
    lambda_rate: float = 0.1
    """Step size of the dual ascent on KL."""
    kl_budget: PerDifficulty = (0.01, 0.02, 0.04)
    """Allowed KL in nats per token, by bucket."""
    min_trajectories: int = 8
    """Buckets with fewer trajectories in a batch keep their controllers."""

    def __post_init__(self) -> None:
        if self.name not in RULE_NAMES:
            raise InputError("name", self.name, f"one of {', '.join(RULE_NAMES)}")


PAPER_HYPERPARAMS = AresHyperparams()
RELEASED_HYPERPARAMS = AresHyperparams(name="released")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedKLController:
    """KL controller of the released code, by bucket; see `controllers.update_released_kl`."""

    betas: PerDifficulty = (1.0, 1.0, 1.0)
    """Factors on the KL coefficient."""
    kl_means: OptionalPerDifficulty = (None, None, None)
    """EMA of the measured KL in nats per token; None before the first measurement."""
    errors: PerDifficulty = (0.0, 0.0, 0.0)
    """EMA of the relative error of the KL, kl_mean / 0.01 - 1."""
    num_updates: int = 0
    """Number of calls of `update_released_kl` so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AresState:
    """State of the controllers across steps, part of the checkpoint; tuples are by bucket."""

    difficulty_by_prompt: Mapping[str, int] = field(default_factory=dict)
    """Difficulty code of every prompt visited so far, by stable prompt id."""
    targets: OptionalPerDifficulty = (None, None, None)
    """Target HWE counts; None before the first update of a bucket."""
    alphas: PerDifficulty = (0.5, 0.5, 0.5)
    """Strength of the reward shaping."""
    lambdas: PerDifficulty = (0.0, 0.0, 0.0)
    """Dual variables of the KL budgets."""
    betas: PerDifficulty | None = None
    """Weight of the KL term; None before the first update, when `kl_coef` applies."""
    threshold: float | None = None
    """Lowest window entropy of an HWE in nats; None before the first batch."""
    released_kl: ReleasedKLController = field(default_factory=ReleasedKLController)
    """KL controller that hyperparameters with the name `released` use."""

    def difficulty_codes(
        self, prompt_ids: Sequence[str], unseen_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the difficulty of each trajectory's prompt, [B] int64.

        Args:
            prompt_ids: prompt of each of the B trajectories.
            unseen_B: [B] codes to use for prompts never visited; None for -1.
        """
        codes = [self.difficulty_by_prompt.get(prompt_id, UNSEEN) for prompt_id in prompt_ids]
        code_B = torch.tensor(codes, dtype=torch.int64)
        if unseen_B is None:
            return code_B
        check_same_shape(code_B=code_B, unseen_B=unseen_B)
        return torch.where(code_B == UNSEEN, unseen_B.long(), code_B)

    def targets_for(self, code_B: torch.Tensor) -> torch.Tensor:
        """Return the HWE target of each difficulty code, NaN if unknown, [B] float64."""
        targets = [torch.nan if target is None else target for target in self.targets]
        return _lookup(targets, torch.nan, code_B)

    def alphas_for(self, code_B: torch.Tensor) -> torch.Tensor:
        """Return the strength alpha of each difficulty code, 0 for the code -1, [B] float64."""
        return _lookup(self.alphas, 0.0, code_B)

    def betas_for(self, code_B: torch.Tensor, hyperparams: AresHyperparams) -> torch.Tensor:
        """Return the KL weight of each difficulty code, `kl_coef` for the code -1, [B] float64."""
        return _lookup(self.betas or (hyperparams.kl_coef,) * 3, hyperparams.kl_coef, code_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class AresStats:
    """Statistics of the training rollouts of a step: all groups, before any filter."""

    prompt_ids: tuple[str, ...]
    """Prompt of each of the B trajectories; equal ids form a group."""
    correct_B: torch.Tensor
    """[B] bool or 0/1, whether each trajectory is correct."""
    hwe_B: torch.Tensor
    """[B] number of HWEs, counted with the threshold from before the step."""
    p95_B: torch.Tensor
    """[B] 95th percentile of the window entropies in nats, from `threshold_p95`; NaN for a
    trajectory without sampled tokens."""
    kl_B: torch.Tensor | None = None
    """[B] mean KL to the reference in nats per token, NaN where it was not measured; None if it was
    measured for no trajectory."""

    def __post_init__(self) -> None:
        check_rank(correct_B=self.correct_B)
        tensors = {"correct_B": self.correct_B, "hwe_B": self.hwe_B, "p95_B": self.p95_B}
        check_same_shape(**tensors if self.kl_B is None else tensors | {"kl_B": self.kl_B})
        if len(self.prompt_ids) != len(self.correct_B):
            expected = f"{len(self.correct_B)}, one for each trajectory of correct_B"
            raise InputError("number of prompt_ids", len(self.prompt_ids), expected)

    def group_B(self) -> torch.Tensor:
        """Return the group of each trajectory, [B] int64: its prompt, in order of appearance."""
        group_by_prompt = {
            prompt_id: index for index, prompt_id in enumerate(dict.fromkeys(self.prompt_ids))
        }
        return torch.tensor([group_by_prompt[prompt_id] for prompt_id in self.prompt_ids])


def bucket_mean(value_B: torch.Tensor, in_bucket_B: torch.Tensor) -> float | None:
    """Return the mean of the values in a bucket that are not NaN; None if there are no such values.

    Args:
        value_B: [B] values.
        in_bucket_B: [B] bool, whether each trajectory belongs to the bucket.
    """
    value_N = value_B[in_bucket_B].double()
    value_N = value_N[~value_N.isnan()]
    return float(value_N.mean()) if len(value_N) else None


def metrics(
    state: AresState, stats: AresStats, code_B: torch.Tensor, hyperparams: AresHyperparams
) -> dict[str, float]:
    """Return share, accuracy, HWE count, KL and controllers per bucket; unknown values are omitted.

    Args:
        state: state of the controllers.
        stats: statistics of the step.
        code_B: [B] difficulty code with which each trajectory's reward was shaped.
        hyperparams: constants of the controllers.
    """
    betas = state.betas or (hyperparams.kl_coef,) * 3
    metrics_by_name: dict[str, float | None] = {"ares/threshold": state.threshold}
    for code, name in enumerate(DIFFICULTY_NAMES):
        in_bucket_B = code_B == code
        metrics_by_name |= {
            f"ares/{name}/share": bucket_mean(in_bucket_B, torch.ones_like(in_bucket_B)),
            f"ares/{name}/accuracy": bucket_mean(stats.correct_B, in_bucket_B),
            f"ares/{name}/hwe": bucket_mean(stats.hwe_B, in_bucket_B),
            f"ares/{name}/target": state.targets[code],
            f"ares/{name}/alpha": state.alphas[code],
            f"ares/{name}/beta": betas[code],
            f"ares/{name}/lambda": state.lambdas[code],
        }
        if stats.kl_B is not None:
            metrics_by_name[f"ares/{name}/kl"] = bucket_mean(stats.kl_B, in_bucket_B)
    return {name: value for name, value in metrics_by_name.items() if value is not None}


def _lookup(by_code: Sequence[float], unseen: float, code_B: torch.Tensor) -> torch.Tensor:
    """Return the value of each difficulty code, `unseen` for any other code, [B] float64."""
    table = torch.tensor([*by_code, unseen], dtype=torch.float64)
    return table[torch.where((code_B >= 0) & (code_B < len(by_code)), code_B, len(by_code))]

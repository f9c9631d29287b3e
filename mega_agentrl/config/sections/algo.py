"""Settings of the objective (`algo.*`): advantages, losses, KL, EGPO and ARES.

How to add a loss is in `actor.training.losses`, how to add an estimator in `train.advantages`; both
can also be a file of your own (`config.user_code`). Settings that only one of them reads are its
options, which it declares itself (`config.declarations`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mega_agentrl.config.algorithm_traits import (
    ESTIMATORS,
    LOSSES,
    EstimatorTraits,
    LossTraits,
)
from mega_agentrl.config.enums import (
    AresMode,
    CotBlocks,
    KlEstimator,
    KlPlacement,
    LossAggregation,
    RolloutCorrection,
)
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.user_code import is_user_code, parse_choice


@dataclass
class EgpoConfig:
    """EGPO (arXiv 2508.05118): adds lam * clip(H, -|A| / alpha, |A| / alpha) to the advantage A.

    H is the mean entropy of the chain of thought.
    """

    lam: float = 0.0
    """Weight of the bonus; 0 disables it. At or above `alpha` the bonus may change the sign of an
    advantage."""
    alpha: float = 2.0
    """Clip bound of the bonus relative to the advantage."""
    cot_markers: list[str] = field(default_factory=lambda: ["<think>", "</think>"])
    """Strings that open and close the chain of thought."""
    cot_blocks: CotBlocks = CotBlocks.first
    """Parts of a response that count as its chain of thought."""

    def __post_init__(self) -> None:
        lam, alpha = self.lam, self.alpha
        check_range(isfinite(lam) and lam >= 0, "algo.egpo.lam", lam, "above 0, or 0 for no bonus")
        check_range(isfinite(alpha) and alpha > 1, "algo.egpo.alpha", alpha, "above 1")
        check_range(
            len(self.cot_markers) == 2 and all(self.cot_markers),
            "algo.egpo.cot_markers",
            self.cot_markers,
            "two strings, the opening and the closing marker",
        )


@dataclass
class AresConfig:
    """ARES (arXiv 2510.08457): rewards and KL weights that depend on the difficulty of a prompt."""

    mode: AresMode = AresMode.off
    """Variant of ARES."""
    trigger_words_file: str = ""
    """Text file of trigger words, one per line, after which entropy windows are counted; empty
    counts them after every token."""
    bootstrap: bool = False
    """Sample the training data once before the first step to initialize difficulties, targets and
    threshold."""
    skip_mastered: bool = False
    """Skip prompts that the policy solves with low entropy."""

    def __post_init__(self) -> None:
        for key in ("bootstrap", "skip_mastered"):
            check_range(
                self.mode is not AresMode.off or not getattr(self, key),
                f"algo.ares.{key}",
                getattr(self, key),
                f"false with algo.ares.mode={self.mode}",
            )


@dataclass
class AlgoConfig:
    """The training objective: advantages, policy loss and KL penalty."""

    advantage: str = "grpo"
    """Name of an advantage estimator, or a user function: `package.module:function` or
    `/folder/file.py:function`."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Values for options of the estimator in place of their defaults
    (`algo.advantage_options.lam=0.95`)."""
    entropy_advantage_weight: float = 0.0
    """AEPO's weight of a token's entropy in its advantage; 0 disables it."""
    loss: str = "clipped"
    """Name of a policy loss, or a user function: `package.module:function` or
    `/folder/file.py:function`."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Values for options of the loss in place of their defaults
    (`algo.loss_options.clip_high=0.28`)."""
    loss_aggregation: LossAggregation = LossAggregation.token_mean
    """Reduction of per-token losses to a scalar."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    rollout_correction: RolloutCorrection = RolloutCorrection.none
    """Importance weights for the mismatch between the engine's and the policy's log-probs."""
    rollout_correction_cap: float = 2.0
    """Largest importance weight C."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty; at 0 the reference log-probs are not computed, except for
    ARES."""
    kl_estimator: KlEstimator = KlEstimator.k3
    """Estimator of the KL divergence from the reference policy."""
    kl_placement: KlPlacement = KlPlacement.loss
    """Whether the KL penalty is part of the loss or of the reward."""
    kl_target: float | None = None
    """Target KL in nats per token towards which the coefficient is adapted, by up to 20 % in ten
    thousand optimizer steps; null keeps it fixed."""
    egpo: EgpoConfig = field(default_factory=EgpoConfig)
    """EGPO bonus."""
    ares: AresConfig = field(default_factory=AresConfig)
    """ARES shaping."""

    def __post_init__(self) -> None:
        self.advantage = parse_choice(self.advantage, ESTIMATORS.registered(), ESTIMATORS.key)
        self.loss = parse_choice(self.loss, LOSSES.registered(), LOSSES.key)
        for key in ("entropy_advantage_weight", "entropy_coef", "kl_coef"):
            value = getattr(self, key)
            check_range(isfinite(value) and value >= 0, f"algo.{key}", value, "at least 0")
        cap = self.rollout_correction_cap
        check_range(isfinite(cap) and cap >= 1, "algo.rollout_correction_cap", cap, "at least 1")
        if self.kl_target is not None:
            check_range(self.kl_target > 0, "algo.kl_target", self.kl_target, "above 0, or null")
            check_range(
                self.kl_coef > 0,
                "algo.kl_coef",
                self.kl_coef,
                f"above 0 with algo.kl_target={self.kl_target}, which needs an initial coefficient",
            )

    @property
    def estimator(self) -> EstimatorTraits:
        """What the advantage estimator needs and returns.

        Raises:
            ConfigError: It is a user function that cannot be used.
        """
        return ESTIMATORS.find_traits(self.advantage, EstimatorTraits)

    @property
    def loss_traits(self) -> LossTraits:
        """What the policy loss takes and returns.

        Raises:
            ConfigError: It is a user function that cannot be used.
        """
        return LOSSES.find_traits(self.loss, LossTraits)

    @property
    def has_user_advantage(self) -> bool:
        """Whether the advantage estimator is a user function."""
        return is_user_code(self.advantage)

    @property
    def has_user_loss(self) -> bool:
        """Whether the policy loss is a user function."""
        return is_user_code(self.loss)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.estimator.needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed; ARES uses them even if `kl_coef` is 0."""
        return self.kl_coef > 0 or self.ares.mode is not AresMode.off

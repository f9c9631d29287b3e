"""Settings of the objective (`algo.*`): advantages, losses, KL, EGPO and ARES.

How to add a loss is in `algo.policy_loss`, how to add an estimator in `train.advantages`; both can
also be a file of your own (`config.user_code`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from mega_agentrl.config.enums import (
    AdvantageEstimator,
    AresMode,
    CotBlocks,
    KlEstimator,
    KlPlacement,
    LossAggregation,
    PolicyLoss,
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
    """An `AdvantageEstimator` (grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline,
    arpo_hard, remax with a greedy baseline, gae with a critic), or a user function:
    `package.module:function` or `/folder/file.py:function`."""
    norm_by_std: bool = True
    """Divide by the standard deviation of the group, for grpo and arpo_hard; for gae, whiten the
    advantages of all trained tokens."""
    gamma: float = 1.0
    """Discount factor of gae."""
    lam: float = 1.0
    """GAE's lambda; with gamma and lam 1 the advantage is the return minus the value."""
    entropy_advantage_weight: float = 0.0
    """AEPO's weight of a token's entropy in its advantage; 0 disables it."""
    loss: str = "clipped"
    """Per-token policy loss: clipped (PPO), balanced (AEPO's clip), gspo (one ratio per
    trajectory), cispo, or a user function: `package.module:function` or
    `/folder/file.py:function`."""
    clip_low: float = 0.2
    """Clip range below a ratio of 1."""
    clip_high: float = 0.2
    """Clip range above a ratio of 1."""
    clip_dual: float | None = 3.0
    """Dual-clip bound on the loss of negative advantages; null disables it."""
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
        self.advantage = parse_choice(self.advantage, AdvantageEstimator, "algo.advantage")
        self.loss = parse_choice(self.loss, PolicyLoss, "algo.loss")
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            check_range(0 <= value <= 1, f"algo.{key}", value, "0 to 1")
            check_range(
                value == 1 or self.needs_critic,
                f"algo.{key}",
                value,
                f"1 with algo.advantage={self.advantage}, which does not use it; only gae does",
            )
        check_range(0 < self.clip_low <= 1, "algo.clip_low", self.clip_low, "above 0, at most 1")
        check_range(self.clip_high > 0, "algo.clip_high", self.clip_high, "above 0")
        if self.clip_dual is not None:
            check_range(self.clip_dual > 1, "algo.clip_dual", self.clip_dual, "above 1, or null")
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
        return self.advantage is AdvantageEstimator.gae

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed; ARES uses them even if `kl_coef` is 0."""
        return self.kl_coef > 0 or self.ares.mode is not AresMode.off

"""Settings of the objective (`algo.*`): advantages, losses, KL, EGPO and ARES."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from mega_agentrl.config.choices import (
    Advantage,
    Aggregation,
    AresMode,
    Correction,
    CotBlocks,
    KlKind,
    KlPlace,
    PolicyLoss,
)
from mega_agentrl.config.ranges import require


@dataclass
class EgpoConfig:
    """EGPO (arXiv 2508.05118): lam * clip(H, -|A| / alpha, |A| / alpha) added to the advantage.

    lam: 0 leaves it out; at or above alpha a bonus may change the sign of an advantage.
    markers: texts that open and close the chain of thought, over which H is the mean entropy.
    blocks: which parts of a response are its chain of thought, see `CotBlocks`.
    """

    lam: float = 0.0
    alpha: float = 2.0
    markers: list[str] = field(default_factory=lambda: ["<think>", "</think>"])
    blocks: CotBlocks = CotBlocks.first

    def __post_init__(self) -> None:
        lam, alpha = self.lam, self.alpha
        require(isfinite(lam) and lam >= 0, "algo.egpo.lam", lam, "above 0, or 0 for none")
        require(isfinite(alpha) and alpha > 1, "algo.egpo.alpha", alpha, "above 1")
        require(
            len(self.markers) == 2 and all(self.markers),
            "algo.egpo.markers",
            self.markers,
            "two texts, the opening and the closing one",
        )


@dataclass
class AresConfig:
    """ARES (arXiv 2510.08457): rewards and KL that follow the difficulty of a prompt.

    mode: see `AresMode`. words: text file of trigger words, one a line: windows are counted
    behind these only; empty for behind every token. bootstrap: one pass of rollouts over the
    training data before the first step sets difficulties, targets and threshold.
    skip_mastered: leave prompts out that are solved without hesitation (`algo.mastery`).
    """

    mode: AresMode = AresMode.off
    words: str = ""
    bootstrap: bool = False
    skip_mastered: bool = False

    def __post_init__(self) -> None:
        for key in ("bootstrap", "skip_mastered"):
            require(
                self.mode is not AresMode.off or not getattr(self, key),
                f"algo.ares.{key}",
                getattr(self, key),
                f"false with algo.ares.mode={self.mode}",
            )


@dataclass
class AlgoConfig:
    """The objective.

    advantage: a name of `Advantage` (grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, arpo_hard, remax with a greedy answer to each prompt as the
    baseline, gae with a critic), or a function of one's own, package.module:function or
    /folder/file.py:function (`train.own_advantage`). norm_by_std: of the group, for grpo and
    arpo_hard; for gae the advantages of all trained tokens are whitened. gamma, lam: discount,
    and GAE's weight of later errors of the critic; 1, 1 is the return less the value.
    entropy_scale: AEPO's weight of a token's entropy in its advantage, 0 for none.

    loss: see `PolicyLoss`. clip_low, clip_high: clip range below and above 1. clip_dual: lower
    bound on the loss of negative advantages (null: none). aggregation: of the tokens' losses.
    entropy_coef: of the entropy bonus. correction: weights for what engine and policy disagree
    about, see `Correction`; correction_cap: C, the largest weight.

    kl_coef: 0 needs no reference pass, but for ares. kl_kind: estimator. kl_place: in the loss,
    or taken off the reward. kl_target: nats a token that the coefficient is steered to, by up to
    20 % in ten thousand optimizer steps; null leaves it fixed.
    """

    advantage: str = "grpo"
    norm_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    entropy_scale: float = 0.0
    loss: PolicyLoss = PolicyLoss.clipped
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    aggregation: Aggregation = Aggregation.token_mean
    entropy_coef: float = 0.0
    correction: Correction = Correction.none
    correction_cap: float = 2.0
    kl_coef: float = 0.0
    kl_kind: KlKind = KlKind.k3
    kl_place: KlPlace = KlPlace.loss
    kl_target: float | None = None
    egpo: EgpoConfig = field(default_factory=EgpoConfig)
    ares: AresConfig = field(default_factory=AresConfig)

    def __post_init__(self) -> None:
        if not self.is_own:
            require(
                self.advantage in Advantage.__members__,
                "algo.advantage",
                self.advantage,
                f"one of {', '.join(Advantage)}, or package.module:function or /folder/file.py",
            )
            self.advantage = Advantage(self.advantage)
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"algo.{key}", value, "0 to 1")
            require(
                value == 1 or self.needs_critic,
                f"algo.{key}",
                value,
                f"1 with algo.advantage={self.advantage}, which reads it only for gae",
            )
        require(0 < self.clip_low <= 1, "algo.clip_low", self.clip_low, "above 0, at most 1")
        require(self.clip_high > 0, "algo.clip_high", self.clip_high, "above 0")
        if self.clip_dual is not None:
            require(self.clip_dual > 1, "algo.clip_dual", self.clip_dual, "above 1, or null")
        for key in ("entropy_scale", "entropy_coef", "kl_coef"):
            value = getattr(self, key)
            require(isfinite(value) and value >= 0, f"algo.{key}", value, "at least 0")
        cap = self.correction_cap
        require(isfinite(cap) and cap >= 1, "algo.correction_cap", cap, "at least 1")
        if self.kl_target is not None:
            require(self.kl_target > 0, "algo.kl_target", self.kl_target, "above 0, or null")
            require(
                self.kl_coef > 0,
                "algo.kl_coef",
                self.kl_coef,
                f"above 0 with algo.kl_target={self.kl_target}, it is where the coefficient starts",
            )

    @property
    def is_own(self) -> bool:
        """Whether the advantage is a function of the user's own."""
        return ":" in self.advantage or self.advantage.endswith(".py")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage is Advantage.gae

    @property
    def needs_reference(self) -> bool:
        """Whether the reference scores the batch: ARES weighs KL even at a coefficient of 0."""
        return self.kl_coef > 0 or self.ares.mode is not AresMode.off

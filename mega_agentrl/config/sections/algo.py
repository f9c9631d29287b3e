"""Settings of the objective (`algo.*`): advantages, losses, KL, EGPO and ARES.

`actor.training.losses` explains how to add a loss and `train.estimators` how to add an estimator;
both can also be in a file of your own (`config.user_code`). Settings that only one of them reads
are its options, which it declares itself (`config.declarations`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

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
    OldLogProbs,
    RolloutCorrection,
)
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import Length, Range, Section
from mega_agentrl.config.user_code import is_user_code, parse_choice

DEFAULT_TRIGGER_WORDS = "default"
"""Value of `algo.ares.trigger_words_file` for the words of `data.encoding.trigger_words`."""


@dataclass
class EgpoConfig(Section, key="algo.egpo"):
    """EGPO (arXiv 2508.05118): adds lam * clip(H, -|A| / alpha, |A| / alpha) to the advantage A.

    H is the mean entropy of the chain of thought.
    """

    lam: Annotated[float, Range(at_least=0, at_most=1000)] = 0.0
    """Weight of the bonus; 0 disables it. At or above `alpha` the bonus may change the sign of an
    advantage."""
    alpha: Annotated[float, Range(above=1, at_most=1_000_000)] = 2.0
    """Clip bound of the bonus relative to the advantage."""
    cot_markers: Annotated[list[str], Length(at_least=2, at_most=2)] = field(
        default_factory=lambda: ["<think>", "</think>"]
    )
    """Strings that open and close the chain of thought."""
    cot_blocks: CotBlocks = CotBlocks.first
    """Parts of a response that count as its chain of thought."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            all(self.cot_markers),
            "algo.egpo.cot_markers",
            self.cot_markers,
            "two strings, the opening and the closing marker",
        )


@dataclass
class AresConfig(Section, key="algo.ares"):
    """ARES (arXiv 2510.08457): rewards and KL weights that depend on the difficulty of a prompt."""

    mode: AresMode = AresMode.off
    """Variant of ARES."""
    trigger_words_file: str = ""
    """Text file of trigger words, one per line, after which entropy windows are counted; `default`
    is the list of this package; empty counts them after every token."""
    bootstrap: bool = False
    """Sample the training data once before the first step to initialize difficulties, targets and
    threshold."""
    skip_mastered: bool = False
    """Skip prompts that the policy solves with low entropy."""
    shape_rewards: bool = True
    """Add the entropy reward; without it only the KL weights depend on the difficulty."""
    window_tokens: Annotated[int, Range(at_least=1, at_most=1024)] = 4
    """Number of tokens in an entropy window."""
    kl_window_factor: Annotated[float, Range(at_least=0, at_most=1000)] = 0.5
    """Factor on the KL weight of tokens inside high-entropy windows; 1 weighs all tokens alike."""
    margin_fraction: Annotated[
        list[float], Length(at_least=3, at_most=3), Range(at_least=0, at_most=1000)
    ] = field(default_factory=lambda: [0.15, 0.25, 0.35])
    """Distance from the target that is not rewarded or punished, as a fraction of the target; for
    easy, medium and hard prompts."""
    alpha_rate: Annotated[float, Range(at_least=0, at_most=1000)] = 0.05
    """Step size of alpha, the strength of the entropy reward."""
    alpha_max: Annotated[float, Range(at_least=0, at_most=1000)] = 2.0
    """Largest alpha."""
    threshold_decay: Annotated[float, Range(at_least=0, at_most=1)] = 0.99
    """Decay of the moving average of the entropy threshold."""
    target_rate: Annotated[float, Range(at_least=0, at_most=1)] = 0.1
    """Rate of the moving average of the target window counts."""
    kl_budget: Annotated[
        list[float], Length(at_least=3, at_most=3), Range(at_least=0, at_most=1000, unit="nats")
    ] = field(default_factory=lambda: [0.01, 0.02, 0.04])
    """KL in nats per token above which the KL weight grows; for easy, medium and hard prompts."""
    kl_budget_rate: Annotated[float, Range(at_least=0, at_most=1000)] = 0.1
    """Step size of the dual ascent on the KL budget; 0 keeps the KL weights of all difficulties at
    `algo.kl_coef`."""
    min_trajectories: Annotated[int, Range(at_least=1, at_most=1_000_000)] = 8
    """Minimum number of trajectories of a difficulty in a step to change its controllers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("bootstrap", "skip_mastered"):
            check_range(
                self.mode is not AresMode.off or not getattr(self, key),
                f"algo.ares.{key}",
                getattr(self, key),
                f"false with algo.ares.mode={self.mode}",
            )


@dataclass
class AlgoConfig(Section, key="algo"):
    """The training objective: advantages, policy loss and KL penalty."""

    advantage: str = "grpo"
    """Name of an advantage estimator, or a user function: `package.module:function` or
    `/folder/file.py:function`."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Values for options of the estimator in place of their defaults
    (`algo.advantage_options.lam=0.95`)."""
    entropy_advantage_weight: Annotated[float, Range(at_least=0, at_most=1000)] = 0.0
    """AEPO's weight of a token's entropy in its advantage; 0 disables it."""
    loss: str = "clipped"
    """Name of a policy loss, or a user function: `package.module:function` or
    `/folder/file.py:function`."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Values for options of the loss in place of their defaults
    (`algo.loss_options.clip_high=0.28`)."""
    loss_aggregation: LossAggregation = LossAggregation.token_mean
    """Reduction of per-token losses to a scalar."""
    entropy_coef: Annotated[float, Range(at_least=0, at_most=1000)] = 0.0
    """Coefficient of the entropy bonus."""
    old_log_probs: OldLogProbs = OldLogProbs.policy
    """Log-probs that the ratios of the loss are taken to. The pass that computes those of the
    policy is left out where nothing else needs it: with `engine`, and with
    `optim.num_minibatches=1`, whose ratios are 1."""
    rollout_correction: RolloutCorrection = RolloutCorrection.none
    """Importance weights for the mismatch between the engine's and the policy's log-probs."""
    rollout_correction_cap: Annotated[float, Range(at_least=1, at_most=1_000_000)] = 2.0
    """Largest importance weight C."""
    kl_coef: Annotated[float, Range(at_least=0, at_most=1000)] = 0.0
    """Coefficient of the KL penalty; at 0 the reference log-probs are not computed, except for
    ARES."""
    kl_estimator: KlEstimator = KlEstimator.k3
    """Estimator of the KL divergence from the reference policy."""
    kl_placement: KlPlacement = KlPlacement.loss
    """Whether the KL penalty is part of the loss or of the reward."""
    kl_target: Annotated[float | None, Range(above=0, at_most=1000, unit="nats")] = None
    """Target KL in nats per token towards which the coefficient is adapted, by up to 20 % in ten
    thousand trajectories; null keeps it fixed."""
    egpo: EgpoConfig = field(default_factory=EgpoConfig)
    """EGPO bonus."""
    ares: AresConfig = field(default_factory=AresConfig)
    """ARES shaping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.advantage = parse_choice(self.advantage, ESTIMATORS.registered(), ESTIMATORS.key)
        self.loss = parse_choice(self.loss, LOSSES.registered(), LOSSES.key)
        check_range(
            self.kl_target is None or self.kl_coef > 0,
            "algo.kl_coef",
            self.kl_coef,
            f"above 0 with algo.kl_target={self.kl_target}, which needs an initial coefficient",
        )

    @property
    def estimator(self) -> EstimatorTraits:
        """Traits of the advantage estimator.

        Raises:
            ConfigError: It is a user function that cannot be used.
        """
        return ESTIMATORS.find_traits(self.advantage, EstimatorTraits)

    @property
    def loss_traits(self) -> LossTraits:
        """Traits of the policy loss.

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
        """Whether there is a KL penalty, which needs reference log-probs.

        ARES has one even if `kl_coef` is 0, because its KL weights grow.
        """
        return self.kl_coef > 0 or self.ares.mode is not AresMode.off

    @property
    def reads_scores(self) -> bool:
        """Whether weights or advantages are computed from the policy's log-probs or entropies.

        A user's own estimator is taken to read them.
        """
        return bool(
            self.needs_reference
            or self.rollout_correction is not RolloutCorrection.none
            or self.egpo.lam
            or self.entropy_advantage_weight
            or self.has_user_advantage
            or self.estimator.reads_scores
        )

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether the loss of a row whose advantages are all 0 is 0, with all of its terms."""
        has_kl_term = self.needs_reference and self.kl_placement is KlPlacement.loss
        return self.loss_traits.is_zero_without_advantage and not (has_kl_term or self.entropy_coef)

    @property
    def has_signal_from_rewards(self) -> bool:
        """Whether a group has advantages other than 0 only if its rewards differ.

        EGPO's bonus is bounded by the advantage, but it reads entropies, as AEPO's scale does.
        """
        reads_scores = self.egpo.lam or self.entropy_advantage_weight or self.needs_reference
        return self.estimator.equal_rewards_give_zero and not reads_scores

"""Traits that estimators and losses declare for the rest of the program.

An estimator is registered in `train/estimators`, a loss in `actor/training/losses.py`, and their
traits are the arguments of the decorators. They are read from the source (`config.declarations`),
so that checks, memory estimates and the driver know them without importing torch, and so that they
hold for a user's own function, too. `AlgoConfig.estimator` and `AlgoConfig.loss_traits` return
them; nothing else compares names of estimators or losses.

To add a trait, add a field here, which the decorators accept at once, and the code that reads it;
checks of settings belong in `config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.config.declarations import CodeSetting

ESTIMATORS = CodeSetting(
    key="algo.advantage",
    options_key="algo.advantage_options",
    expected="a function of (inputs, algo) that returns an AdvantageResult",
    default_name="advantage",
    arguments=("inputs", "algo"),
    decorator="register_advantage",
    source="train/estimators",
)
LOSSES = CodeSetting(
    key="algo.loss",
    options_key="algo.loss_options",
    expected="a function of (logp_BT, old_logp_BT, advantage_BT, mask_BT) with the decorator "
    "mega_agentrl.actor.training.losses.register_loss",
    default_name="loss",
    arguments=("logp_BT", "old_logp_BT", "advantage_BT", "mask_BT"),
    decorator="register_loss",
    needs_decorator=True,
    source="actor/training/losses.py",
)
BRANCHING_RULES = CodeSetting(
    key="rollout.branching",
    options_key="rollout.branching_options",
    expected="a subclass of BranchPolicy that defines num_forks",
    default_name="Branching",
    arguments=("self", "point"),
    method="num_forks",
    base="BranchPolicy",
)

OBJECTIVE_METRICS = (
    *("loss", "num_tokens", "policy_loss", "entropy", "ref_kl"),
    *("grad_norm", "lr", "num_skipped_steps"),
)
"""Metrics that are logged below `actor/` with every loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """Needs and results of an advantage estimator."""

    needs_groups: bool = False
    """Whether it compares the trajectories of a prompt and learns nothing from a single one."""
    needs_critic: bool = False
    """Whether it reads `value_BT`, and returns the critic's targets."""
    needs_greedy_baseline: bool = False
    """Whether it reads `baseline_B`, for which a greedy answer is sampled beside each group."""
    per_trajectory: bool = False
    """Whether it returns one advantage per trajectory; otherwise there may be one per token."""
    averages_shared_tokens: bool = False
    """Whether a token gets the mean of the advantages of the trajectories that share it."""
    equal_without_kl: bool = False
    """Whether the tokens of a trajectory have equal advantages unless a KL is in the reward."""
    supports_kl_in_reward: bool = False
    """Whether it subtracts the KL from the rewards with `algo.kl_placement=reward`."""
    reads_scores: bool = False
    """Whether it reads the policy's log-probs or entropies."""
    equal_rewards_give_zero: bool = False
    """Whether all advantages of a group with equal rewards are 0, whatever the policy's log-probs
    and entropies are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Needs and results of a policy loss."""

    metrics: tuple[str, ...] = ()
    """Names of its metrics, each a mean over the unmasked positions."""
    per_trajectory: bool = False
    """Whether it takes advantages [B], and rows that are whole trajectories, instead of [B, T]."""
    needs_whole_turns: bool = False
    """Whether a token's loss depends on the other tokens of its turn, so that no turn may be cut.
    """
    needs_whole_rows: bool = False
    """Whether a token's loss depends on the other tokens of its row."""
    is_zero_without_advantage: bool = False
    """Whether the loss and its gradient are 0 for a row whose advantages are all 0."""

    @property
    def needs_uncut_rows(self) -> bool:
        """Whether context ranks may not divide a row."""
        return self.per_trajectory or self.needs_whole_turns or self.needs_whole_rows

    def __post_init__(self) -> None:
        if clashing := sorted(set(self.metrics) & set(OBJECTIVE_METRICS)):
            raise ValueError(
                f"metrics has {', '.join(clashing)}, expected other names than "
                f"{', '.join(OBJECTIVE_METRICS)}"
            )

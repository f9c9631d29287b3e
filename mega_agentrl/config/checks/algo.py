"""Check the objective (`algo.*`) against the rest of a configuration.

Part of `check_config`; ranges of single settings are in `sections.algo`. The rejected combinations
would run, but not train on what they say: a ratio over part of a row, a setting that nothing reads,
two controllers of one coefficient. Reads no file except the trigger words of ARES.

Unusual settings that may be intended are a `UserWarning`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import (
    AdvantageEstimator,
    AresMode,
    Branching,
    KlPlacement,
    PolicyLoss,
    RolloutCorrection,
)
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.algo import AlgoConfig

INFERENCE_TEMPLATE_KEY = "rollout.use_inference_chat_template"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """What these checks need to know of a loss: a part of `algo.policy_loss.RegisteredLoss`.

    `BUILT_IN_LOSSES` repeats it for the built-in losses, because the configuration is checked
    without torch; `tests/config/checks/test_check_algo.py` compares the two.
    """

    options: tuple[str, ...]
    """Settings of `algo.*` that it uses."""
    per_trajectory: bool = False
    """Whether its rows must be whole trajectories with one advantage each."""


BUILT_IN_LOSSES = {
    PolicyLoss.clipped: LossTraits(options=("clip_low", "clip_high", "clip_dual")),
    PolicyLoss.balanced: LossTraits(options=("clip_low", "clip_high", "clip_dual")),
    PolicyLoss.gspo: LossTraits(options=("clip_low", "clip_high"), per_trajectory=True),
    PolicyLoss.cispo: LossTraits(options=("clip_low", "clip_high")),
}
_LOSS_OPTIONS = sorted({name for loss in BUILT_IN_LOSSES.values() for name in loss.options})
"""Settings that only losses read."""


def check_algo(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition that `config` violates.

    A user's loss is checked by `check_loss` when it has been loaded.
    """
    if not config.algo.has_user_loss:
        check_loss(config, BUILT_IN_LOSSES[PolicyLoss(config.algo.loss)])
    _check_correction(config)
    _check_remax(config)
    _check_critic(config)
    _check_user_advantage(config.algo)
    _check_egpo(config.algo)
    _check_ares(config.algo)


def check_loss(config: TrainConfig, loss: LossTraits) -> None:
    """Raise a `ConfigError` for a setting that the loss of `algo.loss` ignores or excludes."""
    algo = config.algo
    for name in _LOSS_OPTIONS:
        default = getattr(type(algo), name)
        if name not in loss.options and getattr(algo, name) not in (None, default):
            raise ConfigError(
                f"algo.{name}",
                getattr(algo, name),
                f"the default {default} with algo.loss={algo.loss}, which does not use it",
                "the setting was chosen for another loss",
            )
    if loss.per_trajectory:
        _check_whole_trajectories(config)


def _check_whole_trajectories(config: TrainConfig) -> None:
    """Check that a row has one advantage and is a whole trajectory, as GSPO's ratio requires."""
    algo, with_loss = config.algo, f"with algo.loss={config.algo.loss}"
    if config.parallel.context > 1:
        raise ConfigError(
            "parallel.context",
            config.parallel.context,
            f"1 {with_loss}, which needs whole rows",
            "the parallel layout was chosen for another loss",
        )
    if config.rollout.use_inference_chat_template:
        raise ConfigError(
            INFERENCE_TEMPLATE_KEY,
            True,
            f"false {with_loss}, which needs whole trajectories; the template splits them into "
            "several rows",
            "the setting was chosen for another loss",
        )
    if (
        algo.advantage in (AdvantageEstimator.arpo_hard, AdvantageEstimator.gae)
        or algo.has_user_advantage
    ):
        raise ConfigError(
            "algo.advantage",
            algo.advantage,
            f"an estimator with one advantage per trajectory {with_loss}",
            f"the advantages of {algo.advantage} may differ between the tokens of a row",
        )
    if algo.entropy_advantage_weight:
        raise ConfigError(
            "algo.entropy_advantage_weight",
            algo.entropy_advantage_weight,
            f"0 {with_loss}, which uses the mean advantage of a row",
            "AEPO's advantage was combined with the loss of another paper",
        )
    if algo.advantage is AdvantageEstimator.reinforce_plus_plus and _kl_in_reward(algo):
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            f"loss {with_loss} and algo.advantage=reinforce_plus_plus",
            "the KL of each token makes the advantages of a row differ",
        )


def _check_correction(config: TrainConfig) -> None:
    by_sequence = (RolloutCorrection.sequence_truncate, RolloutCorrection.sequence_mask)
    if config.algo.rollout_correction in by_sequence and config.rollout.use_inference_chat_template:
        raise ConfigError(
            "algo.rollout_correction",
            config.algo.rollout_correction,
            f"a correction by token, or none, with {INFERENCE_TEMPLATE_KEY}=True, where a "
            "trajectory is several rows, each with its own weight",
            "only one of the two was changed",
        )


def _check_remax(config: TrainConfig) -> None:
    if config.algo.advantage is not AdvantageEstimator.remax:
        return
    if config.rollout.branching is Branching.released:
        raise ConfigError(
            "rollout.branching",
            Branching.released,
            "another rule with algo.advantage=remax, which also samples greedy answers",
            "ARPO's released rounds, which do not support greedy answers",
        )
    if config.algo.ares.mode is not AresMode.off:
        raise ConfigError(
            "algo.advantage",
            AdvantageEstimator.remax,
            f"an estimator that compares trajectories with algo.ares.mode={config.algo.ares.mode}, "
            "which does not shape the rewards of greedy answers",
            "two algorithms were combined",
        )


def _check_critic(config: TrainConfig) -> None:
    optim, algo = config.optim, config.algo
    if not algo.needs_critic:
        if optim.critic_warmup_steps:
            raise ConfigError(
                "optim.critic_warmup_steps",
                optim.critic_warmup_steps,
                f"0 with algo.advantage={algo.advantage}, which has no critic",
                "only the estimator was changed",
            )
        return
    if (
        config.total_steps
        and not config.total_epochs
        and optim.critic_warmup_steps >= config.total_steps
    ):
        raise ConfigError(
            "optim.critic_warmup_steps",
            optim.critic_warmup_steps,
            f"below total_steps={config.total_steps}, so that the policy is updated",
            "a short run with the warm-up of a long run",
        )


def _check_user_advantage(algo: AlgoConfig) -> None:
    if algo.has_user_advantage and _kl_in_reward(algo):
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            f"loss with algo.advantage={algo.advantage}, a user function that gets the raw rewards",
            "a preset of another estimator",
        )


def _check_egpo(algo: AlgoConfig) -> None:
    egpo = algo.egpo
    if not egpo.lam:
        return
    if (
        algo.advantage in (AdvantageEstimator.reinforce_plus_plus, AdvantageEstimator.gae)
        or algo.has_user_advantage
    ):
        raise ConfigError(
            "algo.advantage",
            algo.advantage,
            f"an estimator with one advantage per trajectory with algo.egpo.lam={egpo.lam}",
            "EGPO was combined with an estimator other than GRPO",
        )
    if egpo.lam >= egpo.alpha:
        warnings.warn(
            f"algo.egpo.lam={egpo.lam} is not below algo.egpo.alpha={egpo.alpha}: the bonus may "
            "cancel a negative advantage or change its sign (the paper has 0.4 and 2)",
            stacklevel=4,
        )


def _check_ares(algo: AlgoConfig) -> None:
    ares = algo.ares
    if ares.mode is AresMode.off:
        if ares.trigger_words_file:
            raise ConfigError(
                "algo.ares.trigger_words_file",
                ares.trigger_words_file,
                "empty with algo.ares.mode=off, which does not read the words",
                "only the mode was switched off",
            )
        return
    if algo.kl_placement is KlPlacement.reward:
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            f"loss with algo.ares.mode={ares.mode}, which weighs the KL of each token in the loss",
            "a setting of another algorithm",
        )
    if algo.kl_target is not None:
        raise ConfigError(
            "algo.kl_target",
            algo.kl_target,
            f"null with algo.ares.mode={ares.mode}, which adapts the KL weights by difficulty",
            "two controllers of one coefficient",
        )
    if ares.trigger_words_file:
        _check_trigger_words(ares.trigger_words_file)


def _check_trigger_words(file: str) -> None:
    expected = "a text file of trigger words, one per line, or empty for every token"
    if not Path(file).is_file():
        raise ConfigError(
            "algo.ares.trigger_words_file",
            file,
            expected,
            f"the file does not exist below the working folder {Path.cwd()}",
        )
    if not Path(file).read_text(encoding="utf-8", errors="replace").strip():
        raise ConfigError("algo.ares.trigger_words_file", file, expected, "the file is empty")


def _kl_in_reward(algo: AlgoConfig) -> bool:
    return algo.kl_coef > 0 and algo.kl_placement is KlPlacement.reward

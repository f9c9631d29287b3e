"""Check the objective (`algo.*`) against the rest of a configuration.

Part of `check_config`; ranges of single settings are in `sections.algo`. The rejected combinations
would run, but not train on what they say: a ratio over part of a row, a setting that nothing reads,
two controllers of one coefficient. Reads no file except the trigger words of ARES.

Unusual settings that may be intended are a `UserWarning`.
"""

from __future__ import annotations

import warnings
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


def check_algo(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition that `config` violates."""
    _check_clip_dual(config.algo)
    if config.algo.loss is PolicyLoss.gspo:
        _check_gspo(config)
    _check_correction(config)
    _check_remax(config)
    _check_critic(config)
    _check_user_advantage(config.algo)
    _check_egpo(config.algo)
    _check_ares(config.algo)


def _check_clip_dual(algo: AlgoConfig) -> None:
    has_dual_clip = algo.loss in (PolicyLoss.clipped, PolicyLoss.balanced)
    if not has_dual_clip and algo.clip_dual not in (None, type(algo).clip_dual):
        raise ConfigError(
            "algo.clip_dual",
            algo.clip_dual,
            f"null or the default with algo.loss={algo.loss}, which has no dual clip",
            "the setting was chosen for another loss",
        )


def _check_gspo(config: TrainConfig) -> None:
    """Check that a row has one advantage and is a whole trajectory, as GSPO's ratio requires."""
    algo = config.algo
    if config.parallel.context > 1:
        raise ConfigError(
            "parallel.context",
            config.parallel.context,
            "1 with algo.loss=gspo, whose ratio is a mean over the whole row",
            "the parallel layout was chosen for another loss",
        )
    if config.rollout.use_inference_chat_template:
        raise ConfigError(
            INFERENCE_TEMPLATE_KEY,
            True,
            "false with algo.loss=gspo, whose ratio is a mean over the whole trajectory; the "
            "template splits it into several rows",
            "the setting was chosen for another loss",
        )
    if (
        algo.advantage in (AdvantageEstimator.arpo_hard, AdvantageEstimator.gae)
        or algo.has_user_advantage
    ):
        raise ConfigError(
            "algo.advantage",
            algo.advantage,
            "an estimator with one advantage per trajectory with algo.loss=gspo",
            f"the advantages of {algo.advantage} may differ between the tokens of a row",
        )
    if algo.entropy_advantage_weight:
        raise ConfigError(
            "algo.entropy_advantage_weight",
            algo.entropy_advantage_weight,
            "0 with algo.loss=gspo, which uses the mean advantage of a row",
            "AEPO's advantage was combined with the loss of another paper",
        )
    if algo.advantage is AdvantageEstimator.reinforce_plus_plus and _kl_in_reward(algo):
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            "loss with algo.loss=gspo and algo.advantage=reinforce_plus_plus",
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

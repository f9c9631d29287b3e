"""Check the objective (`algo.*`) against the rest of a configuration.

Part of `check_config`; ranges of single settings are in `sections.algo`. A rejected combination
would run, but not train as its settings say: a sequence ratio over part of a trajectory, an option
that nothing reads, two controllers of one coefficient. What an estimator or a loss excludes follows
from its traits (`config.algorithm_traits`). Reads no file except the user's code and the trigger
words of ARES.

Unusual settings that may be intended raise a `UserWarning`.
"""

from __future__ import annotations

import os.path
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.algorithm_traits import ESTIMATORS, LOSSES
from mega_agentrl.config.enums import (
    AresMode,
    Branching,
    KlPlacement,
    OldLogProbs,
    RolloutCorrection,
)
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading
from mega_agentrl.config.sections.algo import DEFAULT_TRIGGER_WORDS, AresConfig

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.algo import AlgoConfig

PAPER_ONLY = ("kl_window_factor", "target_rate", "kl_budget", "kl_budget_rate", "min_trajectories")
"""Settings of `algo.ares` that the published code does not have."""


def check_algo(config: TrainConfig) -> None:
    """Raise a `ConfigError` for the first condition that `config` violates."""
    algo = config.algo
    ESTIMATORS.check_options(algo.advantage, algo.advantage_options)
    LOSSES.check_options(algo.loss, algo.loss_options)
    if algo.loss_traits.needs_uncut_rows and config.parallel.context > 1:
        raise ConfigError(
            "parallel.context",
            config.parallel.context,
            f"1 with algo.loss={algo.loss}, which needs whole rows",
            "the parallel layout was chosen for another loss",
        )
    if algo.loss_traits.per_trajectory:
        _check_whole_trajectories(config)
    _check_correction(config)
    _warn_of_truncated_sampling(config)
    _check_greedy_baseline(config)
    _check_critic(config)
    _check_kl_in_reward(algo)
    _check_egpo(algo)
    _check_ares(algo)


def _check_whole_trajectories(config: TrainConfig) -> None:
    """Check that rows are whole trajectories with one advantage each."""
    algo, with_loss = config.algo, f"with algo.loss={config.algo.loss}"
    if source := config.rollout.source_of_contexts:
        raise ConfigError(
            source,
            config.rollout.agent or True,
            f"none {with_loss}, which needs whole trajectories; a trajectory with several contexts "
            "is several rows",
            "the setting was chosen for another loss",
        )
    estimator = algo.estimator
    is_equal = estimator.per_trajectory and not estimator.averages_shared_tokens
    if not (is_equal or estimator.equal_without_kl):
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
    if not is_equal and _kl_in_reward(algo):
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            f"loss {with_loss} and algo.advantage={algo.advantage}",
            "the KL of each token makes the advantages of a row differ",
        )


def _check_correction(config: TrainConfig) -> None:
    correction, old = config.algo.rollout_correction, config.algo.old_log_probs
    if old is OldLogProbs.engine and correction is not RolloutCorrection.none:
        raise ConfigError(
            "algo.rollout_correction",
            correction,
            f"none with algo.old_log_probs={old}, whose ratios correct for the engine already",
            "tokens would be weighted twice",
        )
    by_sequence = (RolloutCorrection.sequence_truncate, RolloutCorrection.sequence_mask)
    source = config.rollout.source_of_contexts
    if config.algo.rollout_correction in by_sequence and source:
        raise ConfigError(
            "algo.rollout_correction",
            config.algo.rollout_correction,
            f"a correction by token, or none, with {source}, where a trajectory may be several "
            "rows, each with its own weight",
            "only one of the two was changed",
        )


def _warn_of_truncated_sampling(config: TrainConfig) -> None:
    """Warn if tokens are sampled from another distribution than that of their log-probs."""
    rollout = config.rollout
    settings = {"top_p": (rollout.top_p, 1.0), "top_k": (rollout.top_k, 0)}
    truncating = [f"rollout.{name}={got}" for name, (got, off) in settings.items() if got != off]
    if truncating and (config.total_steps or config.total_epochs):
        warnings.warn(
            f"{' and '.join(truncating)}: tokens are sampled from a part of the vocabulary, but "
            "engine and trainer compute their log-probs over all of it, so ratios, KL and "
            "algo.rollout_correction do not see what was cut off; "
            f"{' and '.join(f'rollout.{name}={off:g}' for name, (_, off) in settings.items())} "
            "samples the distribution that is trained",
            stacklevel=4,
        )


def _check_greedy_baseline(config: TrainConfig) -> None:
    algo = config.algo
    if not algo.estimator.needs_greedy_baseline:
        return
    if config.rollout.branching is Branching.released:
        raise ConfigError(
            "rollout.branching",
            Branching.released,
            f"another rule with algo.advantage={algo.advantage}, which also samples greedy answers",
            "ARPO's released rounds, which do not support greedy answers",
        )
    if algo.ares.mode is not AresMode.off:
        raise ConfigError(
            "algo.advantage",
            algo.advantage,
            f"an estimator that compares trajectories with algo.ares.mode={algo.ares.mode}, "
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


def _check_kl_in_reward(algo: AlgoConfig) -> None:
    if _kl_in_reward(algo) and not algo.estimator.supports_kl_in_reward:
        raise ConfigError(
            "algo.kl_placement",
            algo.kl_placement,
            f"loss with algo.advantage={algo.advantage}, which uses the rewards without the KL",
            "a preset of another estimator",
        )


def _check_egpo(algo: AlgoConfig) -> None:
    egpo = algo.egpo
    if not egpo.lam:
        return
    if not algo.estimator.per_trajectory:
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
    if algo.kl_target is not None:
        raise ConfigError(
            "algo.kl_target",
            algo.kl_target,
            f"null with algo.ares.mode={ares.mode}, which adapts the KL weights by difficulty",
            "two controllers of one coefficient",
        )
    if ares.mode is AresMode.released:
        _check_released_ares(ares)
    if ares.trigger_words_file not in ("", DEFAULT_TRIGGER_WORDS):
        _check_trigger_words(ares.trigger_words_file)


def _check_released_ares(ares: AresConfig) -> None:
    """Check that the settings are those of the published code."""
    if not ares.trigger_words_file:
        raise ConfigError(
            "algo.ares.trigger_words_file",
            "",
            f"{DEFAULT_TRIGGER_WORDS} or a text file of words, with algo.ares.mode=released",
            "the published code counts windows after 174 words only, and its list is not part of "
            "this package; without words every token would count",
        )
    defaults = AresConfig()
    for name in PAPER_ONLY:
        value = getattr(ares, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"algo.ares.{name}",
                value,
                f"{getattr(defaults, name)}, its default, with algo.ares.mode=released",
                "a setting of algo.ares.mode=paper, which the published code does not have",
            )


def _check_trigger_words(file: str) -> None:
    expected = "a text file of trigger words, one per line, or empty for every token"
    if not os.path.isfile(file):
        raise ConfigError(
            "algo.ares.trigger_words_file",
            file,
            expected,
            f"the file does not exist below the working folder {Path.cwd()}",
        )
    with reading("algo.ares.trigger_words_file", file, expected):
        text = Path(file).read_text(encoding="utf-8")
    if not text.strip():
        raise ConfigError("algo.ares.trigger_words_file", file, expected, "the file is empty")


def _kl_in_reward(algo: AlgoConfig) -> bool:
    return algo.needs_reference and algo.kl_placement is KlPlacement.reward

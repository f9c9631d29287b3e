"""Conditions between the objective (`algo.*`) and the rest of a configuration.

Part of `check.check`; ranges of single settings are in `algo_schema`. Each of these combinations
would run, and train on something else than it says: a ratio over a part of a row, a setting that
nothing reads, two controllers on one coefficient. Reads the word list of ARES and nothing else.

Every error is a `ValueError` with the key, what was got, what was expected, a probable cause.
What is unusual but may be meant is a `UserWarning`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import (
    Advantage,
    AresMode,
    Branching,
    Correction,
    KlPlace,
    PolicyLoss,
)

if TYPE_CHECKING:
    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.config.schema import TrainConfig

RESTARTS = "rollout.use_inference_chat_template"


def check_algo(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that `config` breaks."""
    if config.algo.loss is PolicyLoss.gspo:
        _check_sequence_ratio(config)
    _check_correction(config)
    _check_remax(config)
    _check_critic(config)
    _check_own(config.algo)
    _check_egpo(config.algo)
    _check_ares(config.algo)


def _check_sequence_ratio(config: TrainConfig) -> None:
    """GSPO has one ratio and one advantage a row, and a row must be a whole trajectory."""
    algo = config.algo
    if config.parallel.context > 1:
        _refuse(
            "parallel.context",
            config.parallel.context,
            "1 with algo.loss=gspo, whose ratio is a mean over the whole row",
            "a layout of another loss",
        )
    if config.rollout.use_inference_chat_template:
        _refuse(
            RESTARTS,
            True,
            "false with algo.loss=gspo, whose ratio is a mean over the whole trajectory, which "
            "is several rows then",
            "a setting of another loss",
        )
    if algo.advantage in (Advantage.arpo_hard, Advantage.gae) or algo.is_own:
        _refuse(
            "algo.advantage",
            algo.advantage,
            "one of whole trajectories with algo.loss=gspo",
            f"{algo.advantage} may differ between the tokens of a row",
        )
    if algo.entropy_scale:
        _refuse(
            "algo.entropy_scale",
            algo.entropy_scale,
            "0 with algo.loss=gspo, which takes the mean advantage of a row",
            "AEPO's scale was set beside another paper's loss",
        )
    if algo.advantage is Advantage.reinforce_plus_plus and _kl_in_reward(algo):
        _refuse(
            "algo.kl_place",
            algo.kl_place,
            "loss with algo.loss=gspo and algo.advantage=reinforce_plus_plus",
            "the KL of each token makes advantages that differ inside a row",
        )


def _check_correction(config: TrainConfig) -> None:
    by_sequence = (Correction.sequence_truncate, Correction.sequence_mask)
    if config.algo.correction in by_sequence and config.rollout.use_inference_chat_template:
        _refuse(
            "algo.correction",
            config.algo.correction,
            f"one by token, or none, with {RESTARTS}=True, where a trajectory is several rows "
            "and each would have a weight of its own",
            "one of them was changed alone",
        )


def _check_remax(config: TrainConfig) -> None:
    if config.algo.advantage is not Advantage.remax:
        return
    if config.rollout.branching is Branching.released:
        _refuse(
            "rollout.branching",
            Branching.released,
            "another one with algo.advantage=remax, whose greedy answers go beside the groups",
            "ARPO's released rounds, which have no room for them",
        )
    if config.algo.ares.mode is not AresMode.off:
        _refuse(
            "algo.advantage",
            Advantage.remax,
            f"one that compares trajectories with algo.ares.mode={config.algo.ares.mode}, whose "
            "shaped rewards a greedy answer does not get",
            "two algorithms were put together",
        )


def _check_critic(config: TrainConfig) -> None:
    optim, algo = config.optim, config.algo
    if not algo.needs_critic:
        if optim.critic_warmup_steps:
            _refuse(
                "optim.critic_warmup_steps",
                optim.critic_warmup_steps,
                f"0 with algo.advantage={algo.advantage}, which has no critic",
                "the estimator was changed alone",
            )
        return
    if config.total_steps and not config.epochs and optim.critic_warmup_steps >= config.total_steps:
        _refuse(
            "optim.critic_warmup_steps",
            optim.critic_warmup_steps,
            f"below total_steps={config.total_steps}, or the policy is never updated",
            "a short run with the warm-up of a long one",
        )


def _check_own(algo: AlgoConfig) -> None:
    if algo.is_own and _kl_in_reward(algo):
        _refuse(
            "algo.kl_place",
            algo.kl_place,
            f"loss with algo.advantage={algo.advantage}, which is given the rewards as they are",
            "a preset of another estimator",
        )


def _check_egpo(algo: AlgoConfig) -> None:
    egpo = algo.egpo
    if not egpo.lam:
        return
    if algo.advantage in (Advantage.reinforce_plus_plus, Advantage.gae) or algo.is_own:
        _refuse(
            "algo.advantage",
            algo.advantage,
            f"one of whole trajectories with algo.egpo.lam={egpo.lam}, which EGPO adds to",
            "EGPO was put on top of another estimator than GRPO's",
        )
    if egpo.lam >= egpo.alpha:
        warnings.warn(
            f"algo.egpo.lam={egpo.lam} is not below algo.egpo.alpha={egpo.alpha}: the bonus may "
            "cancel a negative advantage or change its sign (the paper: 0.4 and 2)",
            stacklevel=4,
        )


def _check_ares(algo: AlgoConfig) -> None:
    ares = algo.ares
    if ares.mode is AresMode.off:
        if ares.words:
            _refuse(
                "algo.ares.words",
                repr(ares.words),
                "nothing with algo.ares.mode=off, which reads no words",
                "the mode was switched off alone",
            )
        return
    if algo.kl_place is KlPlace.reward:
        _refuse(
            "algo.kl_place",
            algo.kl_place,
            f"loss with algo.ares.mode={ares.mode}, which weighs the KL of each token there",
            "a setting of another algorithm",
        )
    if algo.kl_target is not None:
        _refuse(
            "algo.kl_target",
            algo.kl_target,
            f"null with algo.ares.mode={ares.mode}, which steers the KL by difficulty itself",
            "two controllers of one coefficient",
        )
    if ares.words:
        _check_words(ares.words)


def _check_words(file: str) -> None:
    expected = "a text file of trigger words, one a line, or nothing for every token"
    if not Path(file).is_file():
        _refuse(
            "algo.ares.words",
            repr(file),
            expected,
            f"there is no such file below {Path.cwd()}, where the run was started",
        )
    if not Path(file).read_text(encoding="utf-8", errors="replace").strip():
        _refuse("algo.ares.words", repr(file), expected, "the file is empty")


def _kl_in_reward(algo: AlgoConfig) -> bool:
    return algo.kl_coef > 0 and algo.kl_place is KlPlace.reward


def _refuse(key: str, got: object, expected: str, cause: str) -> None:
    raise ValueError(f"{key}={got}: expected {expected}; probable cause: {cause}")

"""Combinations that would not train on what they say are errors."""

import warnings

import pytest

from mega_agentrl.algo.policy_loss import find_loss
from mega_agentrl.config.checks.algo import BUILT_IN_LOSSES, LossTraits, check_algo, check_loss
from mega_agentrl.config.enums import (
    AdvantageEstimator,
    AresMode,
    Branching,
    KlPlacement,
    PolicyLoss,
    RolloutCorrection,
)
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from tests.config.refusals import refused_setting

REWARD_KL = {"kl_coef": 0.1, "kl_placement": KlPlacement.reward}
PAPER = {"ares": AresConfig(mode=AresMode.paper)}
GSPO = {"loss": PolicyLoss.gspo}


def refused_algo(algo, **others):
    """Return key and value that `check_algo` names; `others` are settings `section__leaf`."""
    config = TrainConfig(algo=AlgoConfig(**algo))
    for key, value in others.items():
        section, _, leaf = key.partition("__")
        setattr(getattr(config, section), leaf, value)
    return refused_setting(check_algo, config)


def passes(**algo):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_algo(TrainConfig(algo=AlgoConfig(**algo)))


def test_the_defaults_pass():
    passes()
    for loss in PolicyLoss:
        passes(loss=loss)
    for advantage in AdvantageEstimator:
        passes(advantage=advantage, **REWARD_KL)


def test_gspo_needs_whole_rows_with_one_advantage():
    assert refused_algo(GSPO, parallel__context=2) == ("parallel.context", 2)
    template = refused_algo(GSPO, rollout__use_inference_chat_template=True)
    assert template == ("rollout.use_inference_chat_template", True)
    hard = AdvantageEstimator.arpo_hard
    assert refused_algo(GSPO | {"advantage": hard}) == ("algo.advantage", hard)
    scaled = GSPO | {"entropy_advantage_weight": 0.2}
    assert refused_algo(scaled) == ("algo.entropy_advantage_weight", 0.2)
    by_token = GSPO | {"advantage": AdvantageEstimator.reinforce_plus_plus}
    assert refused_algo(by_token | REWARD_KL) == ("algo.kl_placement", KlPlacement.reward)
    passes(**by_token)
    passes(**GSPO, **REWARD_KL)


def test_the_checks_know_of_each_loss_what_it_is_registered_with():
    assert set(BUILT_IN_LOSSES) == set(PolicyLoss)
    for name, traits in BUILT_IN_LOSSES.items():
        loss = find_loss(name)
        assert (loss.options, loss.per_trajectory) == (traits.options, traits.per_trajectory)


@pytest.mark.parametrize("option", ["clip_low", "clip_high", "clip_dual"])
def test_an_option_that_the_loss_does_not_have_is_refused(option):
    config = TrainConfig(algo=AlgoConfig(**{option: 1.5 if option == "clip_dual" else 0.5}))
    check_loss(config, LossTraits(options=(option,)))
    refused = refused_setting(check_loss, config, LossTraits(options=()))
    assert refused == (f"algo.{option}", getattr(config.algo, option))
    check_loss(TrainConfig(), LossTraits(options=()))


@pytest.mark.parametrize("loss", PolicyLoss)
def test_a_dual_clip_is_refused_where_the_loss_ignores_it(loss):
    passes(loss=loss, clip_dual=None)
    if "clip_dual" in find_loss(loss).options:
        passes(loss=loss, clip_dual=5.0)
    else:
        assert refused_algo({"loss": loss, "clip_dual": 5.0}) == ("algo.clip_dual", 5.0)


@pytest.mark.parametrize("correction", RolloutCorrection)
def test_a_weight_by_sequence_needs_trajectories_of_one_row(correction):
    config = TrainConfig(algo=AlgoConfig(rollout_correction=correction))
    check_algo(config)
    config.rollout.use_inference_chat_template = True
    if "sequence" in correction:
        assert refused_setting(check_algo, config) == ("algo.rollout_correction", correction)
    else:
        check_algo(config)


def test_egpo_adds_to_advantages_of_trajectories():
    egpo = {"egpo": EgpoConfig(lam=0.4)}
    by_token = AdvantageEstimator.reinforce_plus_plus
    assert refused_algo(egpo | {"advantage": by_token}) == ("algo.advantage", by_token)
    for advantage in set(AdvantageEstimator) - {
        AdvantageEstimator.reinforce_plus_plus,
        AdvantageEstimator.gae,
    }:
        passes(**egpo, advantage=advantage)


def test_a_bonus_that_may_change_signs_is_a_warning():
    with pytest.warns(UserWarning, match=r"algo\.egpo\.lam=2\.0 is not below algo\.egpo\.alpha=2"):
        check_algo(TrainConfig(algo=AlgoConfig(egpo=EgpoConfig(lam=2.0, alpha=2.0))))
    passes(egpo=EgpoConfig(lam=1.9))


def test_ares_has_its_own_kl():
    assert refused_algo(PAPER | REWARD_KL) == ("algo.kl_placement", KlPlacement.reward)
    adaptive = PAPER | {"kl_coef": 0.1, "kl_target": 0.02}
    assert refused_algo(adaptive) == ("algo.kl_target", 0.02)
    passes(**PAPER, kl_coef=0.1)
    passes(**PAPER)


def test_trigger_words_are_a_non_empty_file(tmp_path):
    words = tmp_path / "words.txt"

    def with_words(mode=AresMode.released):
        return {"ares": AresConfig(mode=mode, trigger_words_file=str(words))}

    named = ("algo.ares.trigger_words_file", str(words))
    assert refused_algo(with_words()) == named
    words.write_text(" \n\n")
    assert refused_algo(with_words()) == named
    words.write_text("wait\n")
    passes(**with_words())
    assert refused_algo(with_words(AresMode.off)) == named


def test_remax_excludes_released_branching_and_ares():
    remax = {"advantage": AdvantageEstimator.remax}
    passes(**remax)
    released = refused_algo(remax, rollout__branching=Branching.released)
    assert released == ("rollout.branching", Branching.released)
    assert refused_algo(remax | PAPER) == ("algo.advantage", AdvantageEstimator.remax)


def test_a_critic_needs_token_level_advantages_and_a_short_warmup():
    gae = {"advantage": AdvantageEstimator.gae}
    passes(**gae)
    assert refused_algo(gae | GSPO) == ("algo.advantage", AdvantageEstimator.gae)
    egpo = gae | {"egpo": EgpoConfig(lam=0.4)}
    assert refused_algo(egpo) == ("algo.advantage", AdvantageEstimator.gae)
    warmup = "optim.critic_warmup_steps"
    assert refused_algo({}, optim__critic_warmup_steps=3) == (warmup, 3)
    assert refused_algo(gae, optim__critic_warmup_steps=100) == (warmup, 100)

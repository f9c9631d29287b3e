"""Combinations that would not train on what they say are errors."""

import warnings

import pytest

from mega_agentrl.config.checks.algo import check_algo
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

REWARD_KL = {"kl_coef": 0.1, "kl_placement": KlPlacement.reward}
PAPER = {"ares": AresConfig(mode=AresMode.paper)}
GSPO = {"loss": PolicyLoss.gspo}


def message(algo, **others):
    config = TrainConfig(algo=AlgoConfig(**algo))
    for key, value in others.items():
        section, _, leaf = key.partition("__")
        setattr(getattr(config, section), leaf, value)
    with pytest.raises(ValueError, match=r"expected .*; probable cause: ") as caught:
        check_algo(config)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


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
    assert "parallel.context=2: expected 1 with algo.loss=gspo" in message(
        GSPO, parallel__context=2
    )
    text = message(GSPO, rollout__use_inference_chat_template=True)
    assert "rollout.use_inference_chat_template=True: expected false" in text
    assert "algo.advantage=arpo_hard" in message(GSPO | {"advantage": AdvantageEstimator.arpo_hard})
    assert "algo.entropy_advantage_weight=0.2: expected 0" in message(
        GSPO | {"entropy_advantage_weight": 0.2}
    )
    by_token = GSPO | {"advantage": AdvantageEstimator.reinforce_plus_plus}
    assert "algo.kl_placement=reward: expected loss" in message(by_token | REWARD_KL)
    passes(**by_token)
    passes(**GSPO, **REWARD_KL)


@pytest.mark.parametrize("correction", RolloutCorrection)
def test_a_weight_by_sequence_needs_trajectories_of_one_row(correction):
    config = TrainConfig(algo=AlgoConfig(rollout_correction=correction))
    check_algo(config)
    config.rollout.use_inference_chat_template = True
    if "sequence" in correction:
        with pytest.raises(ValueError, match=rf"algo\.rollout_correction={correction}: expected a"):
            check_algo(config)
    else:
        check_algo(config)


def test_egpo_adds_to_advantages_of_trajectories():
    egpo = {"egpo": EgpoConfig(lam=0.4)}
    assert "algo.advantage=reinforce_plus_plus" in message(
        egpo | {"advantage": AdvantageEstimator.reinforce_plus_plus}
    )
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
    assert "algo.kl_placement=reward: expected loss with algo.ares.mode=paper" in message(
        PAPER | REWARD_KL
    )
    adaptive = PAPER | {"kl_coef": 0.1, "kl_target": 0.02}
    assert "algo.kl_target=0.02: expected null" in message(adaptive)
    passes(**PAPER, kl_coef=0.1)
    passes(**PAPER)


def test_trigger_words_are_a_non_empty_file(tmp_path):
    words = tmp_path / "words.txt"

    def with_words(mode=AresMode.released):
        return {"ares": AresConfig(mode=mode, trigger_words_file=str(words))}

    assert f"algo.ares.trigger_words_file='{words}'" in message(with_words())
    words.write_text(" \n\n")
    assert "the file is empty" in message(with_words())
    words.write_text("wait\n")
    passes(**with_words())
    assert "algo.ares.mode=off, which does not read" in message(with_words(AresMode.off))


def test_remax_excludes_released_branching_and_ares():
    remax = {"advantage": AdvantageEstimator.remax}
    passes(**remax)
    text = message(remax, rollout__branching=Branching.released)
    assert "rollout.branching=released: expected another rule with algo.advantage=remax" in text
    assert "algo.advantage=remax: expected an estimator that compares" in message(remax | PAPER)


def test_a_critic_needs_token_level_advantages_and_a_short_warmup():
    gae = {"advantage": AdvantageEstimator.gae}
    passes(**gae)
    assert "advantages of gae may differ between the tokens" in message(gae | GSPO)
    assert "with algo.egpo.lam=0.4" in message(gae | {"egpo": EgpoConfig(lam=0.4)})
    text = message({}, optim__critic_warmup_steps=3)
    assert "optim.critic_warmup_steps=3: expected 0 with algo.advantage=grpo" in text
    assert "expected below total_steps=100" in message(gae, optim__critic_warmup_steps=100)

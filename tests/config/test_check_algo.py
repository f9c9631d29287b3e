"""Every combination of settings that would train on something else than it says is named."""

import warnings

import pytest

from mega_agentrl.config.algo_schema import AlgoConfig, AresConfig, EgpoConfig
from mega_agentrl.config.check_algo import check_algo
from mega_agentrl.config.choices import (
    Advantage,
    AresMode,
    Branching,
    Correction,
    KlPlace,
    PolicyLoss,
)
from mega_agentrl.config.schema import TrainConfig

REWARD_KL = {"kl_coef": 0.1, "kl_place": KlPlace.reward}
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
    for advantage in Advantage:
        passes(advantage=advantage, **REWARD_KL)


def test_gspo_needs_whole_rows_with_one_advantage():
    assert "parallel.context=2: expected 1 with algo.loss=gspo" in message(
        GSPO, parallel__context=2
    )
    restarts = message(GSPO, rollout__use_inference_chat_template=True)
    assert "rollout.use_inference_chat_template=True: expected false" in restarts
    assert "algo.advantage=arpo_hard" in message(GSPO | {"advantage": Advantage.arpo_hard})
    assert "algo.entropy_scale=0.2: expected 0" in message(GSPO | {"entropy_scale": 0.2})
    by_token = GSPO | {"advantage": Advantage.reinforce_plus_plus}
    assert "algo.kl_place=reward: expected loss" in message(by_token | REWARD_KL)
    passes(**by_token)
    passes(**GSPO, **REWARD_KL)


@pytest.mark.parametrize("correction", Correction)
def test_a_weight_by_sequence_needs_trajectories_of_one_row(correction):
    config = TrainConfig(algo=AlgoConfig(correction=correction))
    check_algo(config)
    config.rollout.use_inference_chat_template = True
    if "sequence" in correction:
        with pytest.raises(ValueError, match=rf"algo\.correction={correction}: expected one by"):
            check_algo(config)
    else:
        check_algo(config)


def test_egpo_adds_to_advantages_of_trajectories():
    egpo = {"egpo": EgpoConfig(lam=0.4)}
    assert "algo.advantage=reinforce_plus_plus" in message(
        egpo | {"advantage": Advantage.reinforce_plus_plus}
    )
    for advantage in set(Advantage) - {Advantage.reinforce_plus_plus, Advantage.gae}:
        passes(**egpo, advantage=advantage)


def test_a_bonus_that_may_change_signs_is_a_warning():
    with pytest.warns(UserWarning, match=r"algo\.egpo\.lam=2\.0 is not below algo\.egpo\.alpha=2"):
        check_algo(TrainConfig(algo=AlgoConfig(egpo=EgpoConfig(lam=2.0, alpha=2.0))))
    passes(egpo=EgpoConfig(lam=1.9))


def test_ares_has_its_own_kl():
    assert "algo.kl_place=reward: expected loss with algo.ares.mode=paper" in message(
        PAPER | REWARD_KL
    )
    steered = PAPER | {"kl_coef": 0.1, "kl_target": 0.02}
    assert "algo.kl_target=0.02: expected null" in message(steered)
    passes(**PAPER, kl_coef=0.1)
    passes(**PAPER)


def test_the_words_of_ares_are_a_file_with_words(tmp_path):
    words = tmp_path / "words.txt"

    def with_words(mode=AresMode.released):
        return {"ares": AresConfig(mode=mode, words=str(words))}

    assert f"algo.ares.words='{words}'" in message(with_words())
    words.write_text(" \n\n")
    assert "the file is empty" in message(with_words())
    words.write_text("wait\n")
    passes(**with_words())
    assert "algo.ares.mode=off, which reads no words" in message(with_words(AresMode.off))


def test_a_greedy_answer_goes_with_neither_released_rounds_nor_shaped_rewards():
    remax = {"advantage": Advantage.remax}
    passes(**remax)
    text = message(remax, rollout__branching=Branching.released)
    assert "rollout.branching=released: expected another one with algo.advantage=remax" in text
    assert "algo.advantage=remax: expected one that compares" in message(remax | PAPER)


def test_a_critic_goes_with_single_tokens_and_lets_the_policy_learn_some_time():
    gae = {"advantage": Advantage.gae}
    passes(**gae)
    assert "gae may differ between the tokens" in message(gae | GSPO)
    assert "EGPO adds to" in message(gae | {"egpo": EgpoConfig(lam=0.4)})
    text = message({}, optim__critic_warmup_steps=3)
    assert "optim.critic_warmup_steps=3: expected 0 with algo.advantage=grpo" in text
    assert "expected below total_steps=100" in message(gae, optim__critic_warmup_steps=100)

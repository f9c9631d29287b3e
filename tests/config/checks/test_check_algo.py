"""Combinations that would not train on what they say are errors.

Each trait of an estimator or a loss excludes the same settings in a user's own file.
"""

import warnings

import pytest

from mega_agentrl.config.algorithm_traits import ESTIMATORS, LOSSES
from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.enums import (
    AresMode,
    Branching,
    KlPlacement,
    OldLogProbs,
    RolloutCorrection,
)
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from tests.config.refusals import refused, refused_setting

REWARD_KL = {"kl_coef": 0.1, "kl_placement": KlPlacement.reward}
PAPER = {"ares": AresConfig(mode=AresMode.paper)}
GSPO = {"loss": "gspo"}


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


def test_the_defaults_pass_with_every_loss_and_estimator():
    passes()
    for loss in LOSSES.registered():
        passes(loss=loss)
    for advantage in ESTIMATORS.registered():
        passes(advantage=advantage, **REWARD_KL)


def test_gspo_needs_whole_rows_with_one_advantage():
    assert refused_algo(GSPO, parallel__context=2) == ("parallel.context", 2)
    template = refused_algo(GSPO, rollout__use_inference_chat_template=True)
    assert template == ("rollout.use_inference_chat_template", True)
    hard = "arpo_hard"
    assert refused_algo(GSPO | {"advantage": hard}) == ("algo.advantage", hard)
    scaled = GSPO | {"entropy_advantage_weight": 0.2}
    assert refused_algo(scaled) == ("algo.entropy_advantage_weight", 0.2)
    by_token = GSPO | {"advantage": "reinforce_plus_plus"}
    assert refused_algo(by_token | REWARD_KL) == ("algo.kl_placement", KlPlacement.reward)
    passes(**by_token)
    passes(**GSPO, **REWARD_KL)


def test_future_kl_needs_whole_rows_but_any_advantages():
    loss = {"loss": "future_kl"}
    assert refused_algo(loss, parallel__context=2) == ("parallel.context", 2)
    passes(**loss, advantage="fork_credit")


def test_atpo_needs_whole_turns_but_not_whole_trajectories():
    atpo = {"loss": "atpo"}
    assert refused_algo(atpo, parallel__context=2) == ("parallel.context", 2)
    config = TrainConfig(algo=AlgoConfig(**atpo, advantage="at2po"))
    config.rollout.use_inference_chat_template = True
    check_algo(config)


@pytest.mark.parametrize(
    ("loss", "option", "value", "expected"),
    [
        ("clipped", "clip_low", 0.0, "float, above 0, at most 1"),
        ("gspo", "clip_low", 1.1, "float, above 0, at most 1"),
        ("cispo", "clip_high", 0, "float, above 0"),
        ("balanced", "clip_dual", 1.0, "float or null, above 1"),
        ("clipped", "clip_low", None, "float, above 0, at most 1"),
        ("clipped", "clip_high", True, "float, above 0"),
        ("clipped", "clip_high", "wide", "float, above 0"),
        ("cispo", "clip_dual", 3.0, "an option of algo.loss=cispo: clip_low, clip_high"),
    ],
    ids=["low", "one ratio", "high", "dual", "null", "bool", "text", "another loss's"],
)
def test_an_option_out_of_range_is_named(loss, option, value, expected):
    config = TrainConfig(algo=AlgoConfig(loss=loss, loss_options={option: value}))
    error = refused(check_algo, config)
    assert (error.key, error.got) == (f"algo.loss_options.{option}", value)
    assert error.expected == expected


def test_options_in_range_pass():
    passes(loss_options={"clip_low": 1, "clip_high": 4.0, "clip_dual": None})
    passes(advantage="gae", advantage_options={"gamma": 0, "lam": 1.0, "norm_by_std": False})


def test_a_mistyped_option_is_refused_with_the_nearest_name():
    error = refused(check_algo, TrainConfig(algo=AlgoConfig(loss_options={"clip_hi": 0.3})))
    assert "the nearest is clip_high" in error.cause
    given = {"advantage": "rloo", "advantage_options": {"norm_by_std": False}}
    error = refused(check_algo, TrainConfig(algo=AlgoConfig(**given)))
    assert error.expected == "an option of algo.advantage=rloo: it has none"


@pytest.mark.parametrize(
    ("trait", "settings", "key"),
    [
        ("per_trajectory", {"egpo": EgpoConfig(lam=0.4)}, "algo.advantage"),
        ("equal_without_kl", GSPO, "algo.advantage"),
        ("supports_kl_in_reward", REWARD_KL, "algo.kl_placement"),
    ],
    ids=["one per trajectory", "equal", "kl"],
)
def test_traits_of_a_users_estimator_allow_settings(trait, settings, key, tmp_path):
    function = "def advantage(inputs, algo):\n    pass\n"
    plain = tmp_path / "plain.py"
    plain.write_text(function)
    assert refused_algo(settings | {"advantage": str(plain)})[0] == key
    file = tmp_path / "own.py"
    file.write_text(f"@register_advantage('own', {trait}=True)\n{function}")
    passes(**settings, advantage=str(file))


def test_needs_of_a_users_estimator_are_checked(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "@register_advantage('own', needs_critic=True, needs_greedy_baseline=True)\n"
        "def advantage(inputs, algo):\n    pass\n"
    )
    own = {"advantage": str(file)}
    assert AlgoConfig(**own).needs_critic
    passes(**own)
    assert refused_algo(own, optim__critic_warmup_steps=100)[0] == "optim.critic_warmup_steps"
    assert refused_algo(own | PAPER) == ("algo.advantage", str(file))


def test_a_users_loss_per_trajectory_is_checked_like_gspo(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "@register_loss('own', metrics=(), per_trajectory=True)\n"
        "def loss(logp_BT, old_logp_BT, advantage_B, mask_BT):\n    pass\n"
    )
    assert refused_algo({"loss": str(file)}, parallel__context=2) == ("parallel.context", 2)
    passes(loss=str(file))


@pytest.mark.parametrize("correction", RolloutCorrection)
def test_a_weight_by_sequence_needs_trajectories_of_one_row(correction):
    config = TrainConfig(algo=AlgoConfig(rollout_correction=correction))
    check_algo(config)
    config.rollout.use_inference_chat_template = True
    if "sequence" in correction:
        assert refused_setting(check_algo, config) == ("algo.rollout_correction", correction)
    else:
        check_algo(config)


def test_ratios_to_the_engines_log_probs_are_not_corrected_again():
    config = TrainConfig(algo=AlgoConfig(old_log_probs=OldLogProbs.engine))
    check_algo(config)
    config.algo.rollout_correction = RolloutCorrection.token_mask
    setting = ("algo.rollout_correction", RolloutCorrection.token_mask)
    assert refused_setting(check_algo, config) == setting


def test_egpo_adds_to_advantages_of_trajectories():
    egpo = {"egpo": EgpoConfig(lam=0.4)}
    by_token = "reinforce_plus_plus"
    assert refused_algo(egpo | {"advantage": by_token}) == ("algo.advantage", by_token)
    for advantage in ("grpo", "arpo_hard", "rloo", "remax", "tree_grpo"):
        passes(**egpo, advantage=advantage)


def test_a_bonus_that_may_change_signs_is_a_warning():
    with pytest.warns(UserWarning, match=r"algo\.egpo\.lam=2\.0 is not below algo\.egpo\.alpha=2"):
        check_algo(TrainConfig(algo=AlgoConfig(egpo=EgpoConfig(lam=2.0, alpha=2.0))))
    passes(egpo=EgpoConfig(lam=1.9))


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20)])
def test_sampling_from_a_part_of_the_vocabulary_is_a_warning(name, value):
    config = TrainConfig()
    setattr(config.rollout, name, value)
    with pytest.warns(UserWarning, match=f"rollout.{name}={value}: .* engine and trainer"):
        check_algo(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.total_steps, config.total_epochs = 0, 0  # nothing is trained
        check_algo(config)


def test_ares_has_its_own_kl():
    passes(**PAPER, **REWARD_KL)
    passes(**PAPER, **REWARD_KL | {"kl_coef": 0.0})
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


def test_released_ares_needs_words_and_has_no_settings_of_the_paper():
    def released(**changes):
        return {"ares": AresConfig(mode=AresMode.released, **changes)}

    assert refused_algo(released()) == ("algo.ares.trigger_words_file", "")
    words = {"trigger_words_file": "default"}
    passes(**released(**words))
    passes(**released(**words, window_tokens=8, margin_fraction=[0.1, 0.2, 0.3]))
    assert refused_algo(released(**words, kl_window_factor=1.0)) == (
        "algo.ares.kl_window_factor",
        1.0,
    )
    passes(ares=AresConfig(mode=AresMode.paper, kl_window_factor=1.0))


def test_remax_excludes_released_branching_and_ares():
    remax = {"advantage": "remax"}
    passes(**remax)
    released = refused_algo(remax, rollout__branching=Branching.released)
    assert released == ("rollout.branching", Branching.released)
    assert refused_algo(remax | PAPER) == ("algo.advantage", "remax")


def test_a_critic_needs_token_level_advantages_and_a_short_warmup():
    gae = {"advantage": "gae"}
    passes(**gae)
    assert refused_algo(gae | GSPO) == ("algo.advantage", "gae")
    egpo = gae | {"egpo": EgpoConfig(lam=0.4)}
    assert refused_algo(egpo) == ("algo.advantage", "gae")
    warmup = "optim.critic_warmup_steps"
    assert refused_algo({}, optim__critic_warmup_steps=3) == (warmup, 3)
    assert refused_algo(gae, optim__critic_warmup_steps=100) == (warmup, 100)

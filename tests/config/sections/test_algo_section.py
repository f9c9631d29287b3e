"""Ranges of the objective's settings; presets set what their papers say."""

import math
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mega_agentrl.algo import policy_loss
from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.enums import (
    AdvantageEstimator,
    AresMode,
    Branching,
    CotBlocks,
    FilterMetric,
    KlEstimator,
    KlPlacement,
    LossAggregation,
    PolicyLoss,
)
from mega_agentrl.config.override_keys import known_groups
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from tests.config.refusals import refused, refused_setting

PRESETS = known_groups(find_config_dir())["algo"]


@cache
def preset(name):
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        composed = compose(overrides=[f"+algo={name}"])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), composed))


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("clip_low", 0.0, {}),
        ("clip_low", 1.1, {}),
        ("clip_high", 0.0, {}),
        ("clip_dual", 1.0, {}),
        ("entropy_advantage_weight", -0.1, {}),
        ("entropy_coef", math.nan, {}),
        ("kl_coef", math.inf, {}),
        ("rollout_correction_cap", 0.5, {}),
        ("kl_target", 0.0, {}),
        ("kl_coef", 0.0, {"kl_target": 0.1}),
        ("gamma", 1.1, {"advantage": AdvantageEstimator.gae}),
        ("lam", 0.9, {}),
        ("advantage", "grop", {}),
    ],
)
def test_a_wrong_value_is_named(key, value, others):
    error = refused(AlgoConfig, **{key: value}, **others)
    assert error.key == f"algo.{key}"
    assert error.got is value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lam", -0.1),
        ("lam", math.inf),
        ("alpha", 1.0),
        ("cot_markers", ["<think>"]),
        ("cot_markers", ["<think>", ""]),
    ],
)
def test_a_wrong_setting_of_egpo_is_named(key, value):
    assert refused_setting(EgpoConfig, **{key: value}) == (f"algo.egpo.{key}", value)


@pytest.mark.parametrize("key", ["bootstrap", "skip_mastered"])
def test_ares_settings_need_ares(key):
    assert refused_setting(AresConfig, **{key: True}) == (f"algo.ares.{key}", True)
    assert getattr(AresConfig(mode=AresMode.paper, **{key: True}), key)


def test_which_objectives_need_a_reference():
    assert not AlgoConfig().needs_reference
    assert AlgoConfig(kl_coef=1e-3).needs_reference
    assert AlgoConfig(kl_coef=1e-3, kl_placement=KlPlacement.reward).needs_reference
    for mode in (AresMode.paper, AresMode.released):
        assert AlgoConfig(ares=AresConfig(mode=mode)).needs_reference


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    check_algo(preset(name))


@pytest.mark.parametrize(
    ("name", "algo", "branching"),
    [
        ("aepo", {"loss": PolicyLoss.balanced, "entropy_advantage_weight": 0.2}, Branching.aepo),
        ("arpo", {}, Branching.after_result),
        ("arpo_hard", {"advantage": AdvantageEstimator.arpo_hard}, Branching.after_result),
        ("arpo_released", {}, Branching.released),
        ("cispo", {"loss": PolicyLoss.cispo, "clip_low": 1.0, "clip_high": 4.0}, Branching.none),
        (
            "dapo",
            {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": LossAggregation.token_mean},
            Branching.none,
        ),
        (
            "dr_grpo",
            {"norm_by_std": False, "loss_aggregation": LossAggregation.seq_sum_norm},
            Branching.none,
        ),
        ("egpo", {"egpo": EgpoConfig(lam=0.4, alpha=2.0)}, Branching.none),
        ("grpo", {"advantage": AdvantageEstimator.grpo}, Branching.none),
        (
            "gspo",
            {
                "loss": PolicyLoss.gspo,
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "loss_aggregation": LossAggregation.seq_mean_token_mean,
            },
            Branching.none,
        ),
        ("remax", {"advantage": AdvantageEstimator.remax}, Branching.none),
        ("ppo", {"advantage": AdvantageEstimator.gae, "lam": 0.95}, Branching.none),
        (
            "reinforce_plus_plus",
            {
                "advantage": AdvantageEstimator.reinforce_plus_plus,
                "kl_estimator": KlEstimator.k1,
                "kl_placement": KlPlacement.reward,
            },
            Branching.none,
        ),
        ("rloo", {"advantage": AdvantageEstimator.rloo}, Branching.none),
    ],
)
def test_presets_set_what_their_papers_say(name, algo, branching):
    config = preset(name)
    assert {key: getattr(config.algo, key) for key in algo} == algo
    assert config.rollout.branching is branching


def test_yaml_presets_agree_with_the_presets_of_policy_loss():
    for name, settings in (("dapo", policy_loss.dapo), ("dr_grpo", policy_loss.dr_grpo)):
        algo = preset(name).algo
        assert (algo.clip_low, algo.clip_high) == (settings.clip_low, settings.clip_high)
        assert algo.loss_aggregation == settings.aggregation
        assert algo.norm_by_std == settings.norm_by_std
        assert algo.clip_dual is None
    assert preset("dapo").rollout.filter_metric is FilterMetric.accuracy


def test_the_registered_losses_are_the_choices():
    losses = policy_loss.LOSSES.items()
    # Another test may have loaded a user's loss.
    built_in = {name for name, one in losses if one.function.__module__ == policy_loss.__name__}
    assert built_in == set(PolicyLoss)


def test_egpo_defaults():
    assert AlgoConfig().egpo.cot_blocks is CotBlocks.first
    assert AlgoConfig().egpo.lam == 0

"""Presets of algorithms are valid and have the values of their papers."""

import pytest

from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.enums import (
    AresMode,
    Branching,
    FilterMetric,
    KlEstimator,
    KlPlacement,
    LossAggregation,
)
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig, EgpoConfig
from tests.config.presets import PRESETS, preset


def test_objectives_with_a_kl_need_a_reference():
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
        ("aepo", {"loss": "balanced", "entropy_advantage_weight": 0.2}, Branching.aepo),
        ("arpo", {}, Branching.after_result),
        ("arpo_hard", {"advantage": "arpo_hard"}, Branching.after_result),
        ("arpo_released", {}, Branching.released),
        (
            "cispo",
            {"loss": "cispo", "loss_options": {"clip_low": 1.0, "clip_high": 4.0}},
            Branching.none,
        ),
        (
            "dapo",
            {
                "loss_options": {"clip_high": 0.28, "clip_dual": None},
                "loss_aggregation": LossAggregation.token_mean,
            },
            Branching.none,
        ),
        (
            "dr_grpo",
            {
                "advantage_options": {"norm_by_std": False},
                "loss_options": {"clip_dual": None},
                "loss_aggregation": LossAggregation.seq_sum_norm,
            },
            Branching.none,
        ),
        ("egpo", {"egpo": EgpoConfig(lam=0.4, alpha=2.0)}, Branching.none),
        ("grpo", {"advantage": "grpo"}, Branching.none),
        (
            "gspo",
            {
                "loss": "gspo",
                "loss_options": {"clip_low": 3e-4, "clip_high": 4e-4},
                "loss_aggregation": LossAggregation.seq_mean_token_mean,
            },
            Branching.none,
        ),
        ("remax", {"advantage": "remax"}, Branching.none),
        ("ppo", {"advantage": "gae", "advantage_options": {"lam": 0.95}}, Branching.none),
        (
            "reinforce_plus_plus",
            {
                "advantage": "reinforce_plus_plus",
                "kl_estimator": KlEstimator.k1,
                "kl_placement": KlPlacement.reward,
            },
            Branching.none,
        ),
        ("rloo", {"advantage": "rloo"}, Branching.none),
    ],
)
def test_presets_have_the_values_of_their_papers(name, algo, branching):
    config = preset(name)
    assert {key: getattr(config.algo, key) for key in algo} == algo
    assert config.rollout.branching is branching


def test_dapo_filters_groups_by_accuracy():
    assert preset("dapo").rollout.filter_metric is FilterMetric.accuracy

"""Ranges of `reward.*` and the resolved rubric."""

import math

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.override_keys import is_known
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from tests.config.refusals import refused, refused_setting


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rubric": {"default": {}}}, "reward.rubric.default"),
        ({"rubric": {"bfcl": {"arpo": math.nan}}}, "reward.rubric.bfcl.arpo"),
        ({"functions": {"arpo": "a:b"}}, "reward.functions.arpo"),
        ({"num_workers": 0}, "reward.num_workers"),
        ({"timeout_s": 0.0}, "reward.timeout_s"),
        ({"rubric": {"default": {"model": 1.0}}}, "reward.model.path_or_url"),
    ],
)
def test_a_wrong_value_is_named(changes, key):
    assert refused(RewardConfig, **changes).key == key


def test_the_parts_in_use():
    config = RewardConfig(
        rubric={"default": {"arpo": 1.0, "gsm8k": 0.5}, "bfcl": {"function_call": 1, "arpo": 0.1}}
    )
    assert config.part_names == ("arpo", "gsm8k", "function_call")


def test_a_remote_reward_model_needs_a_name():
    unnamed = refused_setting(RewardModelConfig, path_or_url="http://localhost:8000/v1")
    assert unnamed == ("reward.model.served_model_name", "")
    assert RewardModelConfig(
        path_or_url="https://judge.example/v1", served_model_name="judge"
    ).is_remote
    assert not RewardModelConfig(path_or_url="/models/judge").is_remote


def test_a_rubric_replaces_the_default():
    """A default on the field would be merged with the rubric of a run."""
    assert RewardConfig().weights_by_source["default"] == {"arpo": 1.0}
    assert RewardConfig().weights_by_source["bfcl"] == {"function_call": 1.0}
    named = OmegaConf.merge(
        OmegaConf.structured(RewardConfig), {"rubric": {"default": {"accuracy": 2.0}}}
    )
    config = OmegaConf.to_object(named)
    assert config.weights_by_source == {"default": {"accuracy": 2.0}}
    assert config.part_names == ("accuracy",)
    assert RewardConfig().part_names == ("arpo", "function_call")


def test_names_below_the_rubric_are_free():
    assert is_known("reward.rubric.bfcl.function_call")
    assert is_known("reward.functions.mine")
    assert not is_known("reward.rubrik.default")

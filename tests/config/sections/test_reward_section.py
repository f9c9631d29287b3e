"""Invalid rubrics, and the resolved rubric."""

import math

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.override_keys import is_known
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from tests.config.refusals import refused


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rubric": {"default": {}}}, "reward.rubric.default"),
        ({"rubric": {"bfcl": {"arpo": math.nan}}}, "reward.rubric.bfcl.arpo"),
        ({"functions": {"arpo": "a:b"}}, "reward.functions.arpo"),
        ({"rubric": {"default": {"model": 1.0}}}, "reward.model.path_or_url"),
    ],
)
def test_an_invalid_rubric_is_refused(changes, key):
    assert refused(RewardConfig, **changes).key == key


def test_part_names_are_those_of_all_rubrics_once():
    config = RewardConfig(
        rubric={"default": {"arpo": 1.0, "gsm8k": 0.5}, "bfcl": {"function_call": 1, "arpo": 0.1}}
    )
    assert config.part_names == ("arpo", "gsm8k", "function_call")


def test_a_reward_model_behind_a_url_is_remote():
    assert RewardModelConfig("https://judge.example/v1", served_model_name="judge").is_remote
    assert not RewardModelConfig("/models/judge").is_remote


def test_a_rubric_replaces_the_default():
    """A default on the field would be merged with the rubric of a run."""
    assert RewardConfig().weights_by_source["default"] == {"arpo": 1.0}
    assert RewardConfig().weights_by_source["bfcl"] == {"function_call": 1.0}
    assert RewardConfig().weights_for("math_dapo") == {"accuracy": 1.0}
    named = OmegaConf.merge(
        OmegaConf.structured(RewardConfig), {"rubric": {"default": {"accuracy": 2.0}}}
    )
    config = OmegaConf.to_object(named)
    assert config.weights_by_source == {"default": {"accuracy": 2.0}}
    assert config.part_names == ("accuracy",)
    assert RewardConfig().part_names == ("arpo", "function_call", "accuracy")


def test_names_below_the_rubric_are_free():
    assert is_known("reward.rubric.bfcl.function_call")
    assert is_known("reward.functions.mine")
    assert not is_known("reward.rubrik.default")

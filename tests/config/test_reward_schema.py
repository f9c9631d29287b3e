"""Which rubrics are valid, and what follows from them."""

import math

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.keys import is_known
from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rubric": {"default": {}}}, r"reward.rubric.default=.*at least one part"),
        ({"rubric": {"bfcl": {"arpo": math.nan}}}, r"reward.rubric.bfcl.arpo=nan.*finite"),
        ({"functions": {"arpo": "a:b"}}, r"reward.functions.arpo=a:b.*built in"),
        ({"workers": 0}, "reward.workers=0"),
        ({"deadline_s": 0.0}, "reward.deadline_s=0.0"),
        ({"rubric": {"default": {"model": 1.0}}}, "reward.model.source"),
    ],
)
def test_a_wrong_value_is_named(changes, said):
    with pytest.raises(ValueError, match=said):
        RewardConfig(**changes)


def test_the_parts_in_use():
    config = RewardConfig(
        rubric={"default": {"arpo": 1.0, "gsm8k": 0.5}, "bfcl": {"function_call": 1, "arpo": 0.1}}
    )
    assert config.parts == ("arpo", "gsm8k", "function_call")


def test_a_model_at_an_address_needs_its_name():
    with pytest.raises(ValueError, match=r"reward\.model\.name=''"):
        RewardModelConfig(source="http://localhost:8000/v1")
    assert RewardModelConfig(source="https://judge.example/v1", name="judge").served_elsewhere
    assert not RewardModelConfig(source="/models/judge").served_elsewhere


def test_a_rubric_takes_the_place_of_the_default():
    """Were the default the field's own, arpo would go on paying beside what is named."""
    assert RewardConfig().by_source["default"] == {"arpo": 1.0}
    assert RewardConfig().by_source["bfcl"] == {"function_call": 1.0}
    named = OmegaConf.merge(
        OmegaConf.structured(RewardConfig), {"rubric": {"default": {"accuracy": 2.0}}}
    )
    config = OmegaConf.to_object(named)
    assert config.by_source == {"default": {"accuracy": 2.0}}
    assert config.parts == ("accuracy",)
    assert RewardConfig().parts == ("arpo", "function_call")


def test_names_below_the_rubric_are_free():
    assert is_known("reward.rubric.bfcl.function_call")
    assert is_known("reward.functions.mine")
    assert not is_known("reward.rubrik.default")

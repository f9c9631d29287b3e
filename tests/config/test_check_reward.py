"""Rewards that do not fit the rest of the settings."""

import pytest

from mega_agentrl.config.check_reward import check_reward
from mega_agentrl.config.choices import FilterKey
from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig
from mega_agentrl.config.schema import RolloutConfig, TrainConfig


def settings(filter_key=FilterKey.none, **reward):
    return TrainConfig(reward=RewardConfig(**reward), rollout=RolloutConfig(filter_key=filter_key))


def refused(match, *args, **kwargs):
    with pytest.raises(ValueError, match=rf"{match}.*; probable cause: "):
        check_reward(settings(*args, **kwargs))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return RewardModelConfig(source=str(tmp_path))


def test_the_defaults_pass():
    for key in FilterKey:
        check_reward(settings(key))


def test_functions_have_a_weight_and_an_environment_has_functions():
    mine = {"functions": {"mine": "m:f"}}
    refused(r"reward\.functions\.mine=m:f: no data source has the part mine", **mine)
    used = mine | {"rubric": {"default": {"arpo": 1.0, "mine": 1.0}}, "environment": ["KEY"]}
    check_reward(settings(FilterKey.reward, **used))
    refused(r"reward\.environment=\['KEY'\]: expected none without", environment=["KEY"])


def test_a_reward_model_is_a_folder_or_an_address(folder):
    rubric = {"default": {"arpo": 1.0, "model": 1.0}}
    check_reward(settings(rubric=rubric, model=folder))
    address = RewardModelConfig(source="http://host/v1", name="judge", key_env="KEY")
    for key in FilterKey:
        check_reward(settings(key, rubric=rubric, model=address))
    missing = RewardModelConfig(source="host:8000/v1")
    refused(
        r"reward\.model\.source='host:8000/v1': there is no config", rubric=rubric, model=missing
    )
    folder.key_env = "KEY"
    refused(r"reward\.model\.key_env=KEY: expected none with a folder", rubric=rubric, model=folder)


def test_groups_are_filtered_before_a_model_in_a_folder_reads_them(folder):
    second = {"default": {"arpo": 1.0, "model": 1.0}}
    first = {"judged": {"model": 1.0}, "default": {"arpo": 1.0}}
    check_reward(settings(FilterKey.accuracy, rubric=second, model=folder))
    check_reward(settings(rubric=first, model=folder))
    refused("filter_key=reward: expected accuracy", FilterKey.reward, rubric=second, model=folder)
    for key in (FilterKey.reward, FilterKey.accuracy):
        refused(
            rf"filter_key={key}: expected none \(model decides judged\)",
            key,
            rubric=first,
            model=folder,
        )

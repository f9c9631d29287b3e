"""Reward settings that contradict other settings."""

import pytest

from mega_agentrl.config.checks.reward import check_reward
from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.schema import RolloutConfig, TrainConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig


def settings(filter_metric=FilterMetric.none, **reward):
    return TrainConfig(
        reward=RewardConfig(**reward), rollout=RolloutConfig(filter_metric=filter_metric)
    )


def refused(match, *args, **kwargs):
    with pytest.raises(ValueError, match=rf"{match}.*; probable cause: "):
        check_reward(settings(*args, **kwargs))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return RewardModelConfig(path_or_url=str(tmp_path))


def test_the_defaults_pass():
    for key in FilterMetric:
        check_reward(settings(key))


def test_functions_have_a_weight_and_worker_env_vars_have_functions():
    mine = {"functions": {"mine": "m:f"}}
    refused(r"reward\.functions\.mine=m:f: no data source has the part mine", **mine)
    used = mine | {"rubric": {"default": {"arpo": 1.0, "mine": 1.0}}, "worker_env_vars": ["KEY"]}
    check_reward(settings(FilterMetric.reward, **used))
    refused(r"reward\.worker_env_vars=\['KEY'\]: expected none without", worker_env_vars=["KEY"])


def test_a_reward_model_is_a_folder_or_a_url(folder):
    rubric = {"default": {"arpo": 1.0, "model": 1.0}}
    check_reward(settings(rubric=rubric, model=folder))
    remote = RewardModelConfig(
        path_or_url="http://host/v1", served_model_name="judge", api_key_env="KEY"
    )
    for key in FilterMetric:
        check_reward(settings(key, rubric=rubric, model=remote))
    missing = RewardModelConfig(path_or_url="host:8000/v1")
    refused(
        r"reward\.model\.path_or_url='host:8000/v1': there is no config",
        rubric=rubric,
        model=missing,
    )
    folder.api_key_env = "KEY"
    refused(
        r"reward\.model\.api_key_env=KEY: expected none with a folder", rubric=rubric, model=folder
    )


def test_a_filter_cannot_use_a_hosted_reward_model(folder):
    second = {"default": {"arpo": 1.0, "model": 1.0}}
    first = {"judged": {"model": 1.0}, "default": {"arpo": 1.0}}
    check_reward(settings(FilterMetric.accuracy, rubric=second, model=folder))
    check_reward(settings(rubric=first, model=folder))
    refused(
        "filter_metric=reward: expected accuracy", FilterMetric.reward, rubric=second, model=folder
    )
    for key in (FilterMetric.reward, FilterMetric.accuracy):
        refused(
            rf"filter_metric={key}: expected none \(model decides judged\)",
            key,
            rubric=first,
            model=folder,
        )

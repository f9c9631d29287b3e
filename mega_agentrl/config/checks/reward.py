"""Check the settings of the reward against the rest of a configuration.

Checks that need the tools or the data are in `reward`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.sections.reward import MODEL_PART

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.reward import RewardConfig


def check_reward(config: TrainConfig) -> None:
    """Raise a `ValueError` for the first condition that `config` violates."""
    reward = config.reward
    for name, path in reward.functions.items():
        if name not in reward.part_names:
            raise ValueError(
                f"reward.functions.{name}={path}: no data source has the part {name}, expected "
                f"a part of reward.rubric ({', '.join(reward.part_names)}); probable cause: a "
                "mistyped name or a missing weight"
            )
    if reward.worker_env_vars and not reward.functions:
        raise ValueError(
            f"reward.worker_env_vars={list(reward.worker_env_vars)}: expected none without "
            "reward.functions, whose worker processes see them; probable cause: the API key of a "
            "reward model, which is set by reward.model.api_key_env"
        )
    if reward.hosts_reward_model:
        _check_hosted_reward_model(reward)
        _check_filter(config)


def _check_hosted_reward_model(reward: RewardConfig) -> None:
    folder = reward.model.path_or_url
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"reward.model.path_or_url={folder!r}: there is no config.json in it; expected a "
            "Hugging Face checkpoint folder, or a URL that starts with http:// or https://; "
            "probable cause: a mistyped path, or a URL without http://"
        )
    if reward.model.api_key_env:
        raise ValueError(
            f"reward.model.api_key_env={reward.model.api_key_env}: expected none with a folder as "
            "reward.model.path_or_url; probable cause: only the URL was replaced"
        )


def _check_filter(config: TrainConfig) -> None:
    """Check that the filter needs no hosted reward model, which scores whole batches later."""
    metric, rubric = config.rollout.filter_metric, config.reward.weights_by_source
    sources = [source for source, parts in rubric.items() if next(iter(parts)) == MODEL_PART]
    if metric is FilterMetric.reward or (metric is FilterMetric.accuracy and sources):
        expected = f"none ({MODEL_PART} decides {', '.join(sources)})" if sources else "accuracy"
        raise ValueError(
            f"rollout.filter_metric={metric}: expected {expected} with a reward model in a folder, "
            "which scores whole batches after groups have been filtered; probable cause: a filter "
            "of another rubric. A reward model behind a URL scores in time"
        )

"""Conditions between the reward's settings and the rest of a configuration.

What needs the tools or the data is checked where these are known, in `reward.check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.config.reward_schema import MODEL_PART

if TYPE_CHECKING:
    from mega_agentrl.config.reward_schema import RewardConfig
    from mega_agentrl.config.schema import TrainConfig


def check_reward(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that the reward's settings break."""
    reward = config.reward
    for name, path in reward.functions.items():
        if name not in reward.parts:
            raise ValueError(
                f"reward.functions.{name}={path}: no data source has the part {name}, expected "
                f"one under reward.rubric, whose parts are {', '.join(reward.parts)}; probable "
                "cause: a mistyped name, or a weight that was forgotten"
            )
    if reward.environment and not reward.functions:
        raise ValueError(
            f"reward.environment={list(reward.environment)}: expected none without "
            "reward.functions, only their processes see it; probable cause: the key of a reward "
            "model, which is reward.model.key_env"
        )
    if reward.serves_model:
        _check_served(reward)
        _check_filter(config)


def _check_served(reward: RewardConfig) -> None:
    source = reward.model.source
    if not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"reward.model.source={source!r}: there is no config.json in it; expected a Hugging "
            "Face checkpoint folder, or an address that starts with http:// or https://; "
            "probable cause: a mistyped path, or an address without its http://"
        )
    if reward.model.key_env:
        raise ValueError(
            f"reward.model.key_env={reward.model.key_env}: expected none with a folder as "
            "reward.model.source; probable cause: the address was replaced alone"
        )


def _check_filter(config: TrainConfig) -> None:
    """Groups are filtered before the reward model reads the batch they are in."""
    key, rubric = config.rollout.filter_key, config.reward.by_source
    decides = [source for source, parts in rubric.items() if next(iter(parts)) == MODEL_PART]
    if key is FilterKey.reward or (key is FilterKey.accuracy and decides):
        expected = f"none ({MODEL_PART} decides {', '.join(decides)})" if decides else "accuracy"
        raise ValueError(
            f"rollout.filter_key={key}: expected {expected} with the reward model of a folder, "
            "which reads whole batches, after groups have been filtered; probable cause: a "
            "filter that was set for another rubric. A model at an address is asked in time"
        )

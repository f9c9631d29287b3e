"""Checks rubrics against the run's tools and data before anything starts.

Worker processes check user functions themselves when they start.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.config.sections.reward import BUILT_IN_PARTS, DEFAULT_SOURCE
from mega_agentrl.reward import function_call
from mega_agentrl.sandbox.worker_main import to_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Prompt

_NUM_SUGGESTIONS = 3


def check_rubric_parts(config: RewardConfig, names: Collection[str]) -> None:
    """Check that every part of the rubrics exists exactly once.

    Args:
        config: the rubrics.
        names: names of the tools and simulated users.

    Raises:
        ValueError: a part does not exist, or its name is ambiguous.
    """
    for name in names:
        if name in BUILT_IN_PARTS or name in config.functions:
            if name in config.part_names:
                raise ValueError(
                    f"reward.rubric: the part {name} is a tool's or a user's name and that of "
                    "another part, expected different names; rename the tool, or the function "
                    "under reward.functions"
                )
    known = (*BUILT_IN_PARTS, *config.functions, *names)
    for source, weights in config.weights_by_source.items():
        for name, weight in weights.items():
            if name not in known:
                near = get_close_matches(name, known, n=_NUM_SUGGESTIONS) or known
                raise ValueError(
                    f"reward.rubric.{source}.{name}={weight}: there is no such part, expected one "
                    f"of {', '.join(near)}; probable cause: a mistyped name, or "
                    "tool.user_tools_file, "
                    "rollout.interaction_config_file or reward.functions is not set"
                )


def check_prompt_rubrics(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Check that every prompt has a rubric whose parts can score it.

    Raises:
        ValueError: a prompt has no rubric, or a part cannot read its ground truth or extra info.
    """
    for prompt in prompts:
        source = prompt.data_source
        weights = config.weights_by_source.get(source) or config.weights_by_source.get(
            DEFAULT_SOURCE
        )
        if not weights:
            raise ValueError(
                f"prompt {prompt.prompt_id}: reward.rubric has neither its data source {source} "
                f"nor {DEFAULT_SOURCE}, expected one of both beside "
                f"{', '.join(config.weights_by_source)}; "
                "probable cause: a mistyped data source, or data of another kind"
            )
        try:
            _check_prompt_parts(config, weights, prompt)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def _check_prompt_parts(config: RewardConfig, weights: Collection[str], prompt: Prompt) -> None:
    if "function_call" in weights and config.function_call_match is not FunctionCallMatch.string:
        function_call.check_ground_truth(prompt.ground_truth)
    if any(name in config.functions for name in weights):
        try:
            to_json(dict(prompt.extra_info))
        except ValueError as error:
            raise ValueError(f"extra_info: {error}; reward functions get it as JSON") from error

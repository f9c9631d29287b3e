"""What a rubric needs of the run and of its data, checked before anything starts.

Whether functions of the user's own can be called is checked by their processes as they start.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import CallMatch
from mega_agentrl.config.reward_schema import BUILT_IN_PARTS, DEFAULT_SOURCE
from mega_agentrl.reward import function_call
from mega_agentrl.sandbox.worker_program import to_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mega_agentrl.config.reward_schema import RewardConfig
    from mega_agentrl.types.records import Prompt

_NUM_NEAR = 3


def check_parts(config: RewardConfig, names: Collection[str]) -> None:
    """Raise `ValueError` for a part that the run does not have, or has twice.

    names: of the tools and of the simulated users.
    """
    for name in names:
        if name in BUILT_IN_PARTS or name in config.functions:
            if name in config.parts:
                raise ValueError(
                    f"reward.rubric: the part {name} is a tool's or a user's name and that of "
                    "another part, expected different names; rename the tool, or the function "
                    "under reward.functions"
                )
    known = (*BUILT_IN_PARTS, *config.functions, *names)
    for source, weights in config.by_source.items():
        for name, weight in weights.items():
            if name not in known:
                near = get_close_matches(name, known, n=_NUM_NEAR) or known
                raise ValueError(
                    f"reward.rubric.{source}.{name}={weight}: there is no such part, expected one "
                    f"of {', '.join(near)}; probable cause: a mistyped name, or tool.file, "
                    "rollout.interaction_file or reward.functions is not set"
                )


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raise `ValueError` for the first prompt that has no rubric, or whose parts cannot read it."""
    for prompt in prompts:
        source = prompt.data_source
        weights = config.by_source.get(source) or config.by_source.get(DEFAULT_SOURCE)
        if not weights:
            raise ValueError(
                f"prompt {prompt.prompt_id}: reward.rubric has neither its data source {source} "
                f"nor {DEFAULT_SOURCE}, expected one of both beside {', '.join(config.by_source)}; "
                "probable cause: a mistyped data source, or data of another kind"
            )
        try:
            _check_prompt(config, weights, prompt)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def _check_prompt(config: RewardConfig, weights: Collection[str], prompt: Prompt) -> None:
    if "function_call" in weights and config.match is not CallMatch.string:
        function_call.check_ground_truth(prompt.ground_truth)
    if any(name in config.functions for name in weights):
        try:
            to_json(dict(prompt.extra_info))
        except ValueError as error:
            raise ValueError(f"extra_info: {error}; reward functions get it as JSON") from error

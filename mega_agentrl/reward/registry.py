"""Registry of the built-in reward parts.

A part is a function of a finished trajectory and `reward.*`. It may have a check of the prompts
that it scores, which runs before anything starts.

To add one:

1. Write it in a new file here, with `@register_reward("name", check=...)`; test hand-worked scores.
2. Import that file in `rubric`, which registers the part.
3. Add the name to `BUILT_IN_PARTS` in `config/sections/reward.py`, to the table of parts in
   `docs/own_reward.md`, and as a preset to `configs/reward/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Prompt, Score, Trajectory

PartFunction = Callable[["Trajectory", "RewardConfig"], "Score"]
PartFunctionT = TypeVar("PartFunctionT", bound=PartFunction)
PromptCheck = Callable[["Prompt", "RewardConfig"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredReward:
    """A built-in part that `reward.rubric` can name."""

    function: PartFunction
    """Returns the score of a trajectory; must not raise for what the policy wrote."""
    check: PromptCheck | None
    """Raises `ValueError` for a prompt that the part cannot score; None if there is none."""


REWARDS: dict[str, RegisteredReward] = {}
"""The registered parts by name."""


def register_reward(
    name: str, *, check: PromptCheck | None = None
) -> Callable[[PartFunctionT], PartFunctionT]:
    """Register the decorated function as the part `name`; `check` is in `RegisteredReward`."""

    def register(function: PartFunctionT) -> PartFunctionT:
        assert name not in REWARDS, f"the part {name} has two functions"
        REWARDS[name] = RegisteredReward(function=function, check=check)
        return function

    return register


def assistant_text(trajectory: Trajectory) -> str:
    """Return the text of all assistant turns."""
    return "".join(turn.text for turn in trajectory.turns if turn.role is Role.assistant)

"""Registry of the built-in reward parts.

A part is a function of a finished trajectory and the settings `reward.*` that returns a `Score`, or
a future of one. It may come with a check of the prompts, which runs before the run starts.

To add one:

1. Write it in a new file of this package, with `@register_reward("name", check=...)`, and test it
   on scores that were worked out by hand.
2. Import that file in `rubric`, which registers the part.
3. Add the name to `BUILT_IN_PARTS` in `config/sections/reward.py`, to the table of parts in
   `docs/own_reward.md`, and as a preset to `configs/reward/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mega_agentrl.types.ground_truth import accepted_answers
from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Prompt, Score, Trajectory

PartFunction = Callable[["Trajectory", "RewardConfig"], "Score | Future[Score]"]
PartFunctionT = TypeVar("PartFunctionT", bound=PartFunction)
PromptCheck = Callable[["Prompt", "RewardConfig"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredReward:
    """A built-in part that `reward.rubric` can name."""

    function: PartFunction
    """Returns the score of a trajectory or its future; must not raise for what the policy wrote."""
    check: PromptCheck | None
    """Raises `ValueError` for a prompt that the part cannot score; None for no check."""


REWARDS: dict[str, RegisteredReward] = {}
"""The registered parts by name."""


def register_reward(
    name: str, *, check: PromptCheck | None = None
) -> Callable[[PartFunctionT], PartFunctionT]:
    """Register the decorated function as a reward part.

    Args:
        name: name of the part in `reward.rubric`.
        check: see `RegisteredReward.check`.
    """

    def register(function: PartFunctionT) -> PartFunctionT:
        assert name not in REWARDS, f"the part {name} is registered twice"
        REWARDS[name] = RegisteredReward(function=function, check=check)
        return function

    return register


def check_answers(prompt: Prompt, config: RewardConfig) -> None:
    """Raise `InputError` unless the ground truth has an answer to compare with.

    This is the check of parts that compare the answer with texts.
    """
    accepted_answers(prompt.ground_truth)


def assistant_text(trajectory: Trajectory) -> str:
    """Return the text of all assistant turns, concatenated."""
    return "".join(turn.text for turn in trajectory.turns if turn.role is Role.assistant)

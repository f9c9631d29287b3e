"""A checker of numeric answers that sends the policy back to work: the example of a user.

The prompt's `interaction_kwargs` hold the `ground_truth`: a number, or a solution that ends in
`#### number`, as in the GSM8K dataset. A message whose last number is the right one ends the
conversation; any other is answered by `WRONG`. Final reward: 1 where the last
message was right, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.interaction import Interaction, Reply
from mega_agentrl.tool.gsm8k import MAX_ANSWER_CHARS, parse_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from fractions import Fraction

    from mega_agentrl.types.records import Message

WRONG = "Your answer is wrong. Think about it once more, then give the number."


@dataclass(slots=True)
class _Checked:
    truth: Fraction
    is_right: bool = False


class Gsm8kUser(Interaction):
    """Says that an answer is wrong until it is right or `max_turns` is reached."""

    name = "gsm8k_user"

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """The ground truth must be there and be a number."""
        _truth(kwargs)

    async def create(self, kwargs: Mapping[str, Any]) -> _Checked:
        """What is right, and whether that was said. kwargs: `ground_truth`."""
        return _Checked(_truth(kwargs))

    async def respond(self, state: _Checked, messages: Sequence[Message]) -> Reply:
        """Judge the last message."""
        said = str(messages[-1]["content"])[-MAX_ANSWER_CHARS:]
        state.is_right = parse_answer(said) == state.truth
        return Reply(done=True) if state.is_right else Reply(text=WRONG)

    async def fork(self, state: _Checked) -> _Checked:
        """A verdict of the fork's own from here on."""
        return _Checked(state.truth, state.is_right)

    async def calc_reward(self, state: _Checked) -> float:
        """1 where the last message was right."""
        return float(state.is_right)


def _truth(kwargs: Mapping[str, Any]) -> Fraction:
    given = kwargs.get("ground_truth")
    truth = parse_answer(str(given).rpartition("####")[2]) if given is not None else None
    if truth is None:
        raise ValueError(
            f"interaction_kwargs.ground_truth is {given!r}, expected a number or a solution that "
            "ends in '#### number'; probable cause: the dataset was made for another interaction"
        )
    return truth

"""Example interaction: a user who checks numeric answers and asks again after a wrong one.

The prompt's `interaction_kwargs` hold the `ground_truth`: a number, or a solution that ends in
`#### number`, as in the GSM8K dataset. A message whose last number is correct ends the
conversation; any other is answered with `WRONG_ANSWER_REPLY`. The final reward is 1 if the last
message was correct, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.interaction.base import Interaction, Reply
from mega_agentrl.tool.gsm8k import MAX_ANSWER_CHARS, parse_answer, parse_ground_truth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from fractions import Fraction

    from mega_agentrl.types.records import Message

WRONG_ANSWER_REPLY = "Your answer is wrong. Think about it once more, then give the number."


@dataclass(slots=True)
class _Gsm8kState:
    ground_truth: Fraction
    is_correct: bool = False


class Gsm8kInteraction(Interaction):
    """Rejects answers until one is correct or `max_turns` is reached."""

    name = "gsm8k_user"

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless `ground_truth` is present and a number."""
        parse_ground_truth(kwargs, "interaction_kwargs")

    async def create(self, kwargs: Mapping[str, Any]) -> _Gsm8kState:
        """Parse the `ground_truth` of `kwargs`."""
        return _Gsm8kState(parse_ground_truth(kwargs, "interaction_kwargs"))

    async def respond(self, state: _Gsm8kState, messages: Sequence[Message]) -> Reply:
        """Compare the last number of the last message with the ground truth."""
        answer = str(messages[-1]["content"])[-MAX_ANSWER_CHARS:]
        state.is_correct = parse_answer(answer) == state.ground_truth
        return Reply(is_last=True) if state.is_correct else Reply(text=WRONG_ANSWER_REPLY)

    async def fork(self, state: _Gsm8kState) -> _Gsm8kState:
        """Copy the state."""
        return _Gsm8kState(state.ground_truth, state.is_correct)

    async def calc_reward(self, state: _Gsm8kState) -> float:
        """Return 1 if the last message was correct, else 0."""
        return float(state.is_correct)

"""A checker of numeric answers, as an example of a user tool.

The prompt's `create_kwargs` hold the `ground_truth`: a number, or a solution that ends in `####
number`, as in the GSM8K dataset. The policy may submit any number of answers and is told whether
the last one was right. The step reward is 0 for an answer that improves on the one before (from
wrong or none to right), else `NO_IMPROVEMENT_REWARD`, so that guessing has a cost. The final reward
is 1 if the last answer is right, else 0.

Answers are compared as numbers: 18, $18.00, 18% and 36/2 are equal. The last number of a text
counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_IMPROVEMENT_REWARD = -0.05
MAX_ANSWER_CHARS = 2000

# At most 30 digits per part, so that no text leads to arithmetic on huge numbers.
_NUMBER_PATTERN = re.compile(
    r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{1,30})?(?:/\d{1,30})?(?!\d)"
)


@dataclass(slots=True, kw_only=True, frozen=True)
class _AnswerCheck:
    ground_truth: Fraction
    is_correct: bool = False


class Gsm8kTool(Tool):
    """Tells the policy whether an answer is right, and rewards the last one."""

    name = "gsm8k"
    description = "Checks a numeric answer to the question."
    text_argument = "answer"

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that the ground truth is present and a number."""
        parse_ground_truth(kwargs.get("create_kwargs") or {}, "tool gsm8k: create_kwargs")

    async def create(self, kwargs: Mapping[str, Any]) -> list[_AnswerCheck]:
        """Return the list of checks so far; `kwargs` holds the `ground_truth`."""
        return [_AnswerCheck(ground_truth=parse_ground_truth(kwargs, "tool gsm8k: create_kwargs"))]

    async def execute(
        self, state: list[_AnswerCheck], arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Check `arguments["answer"]`."""
        last = state[-1]
        answer = parse_answer(str(arguments["answer"])[-MAX_ANSWER_CHARS:])
        is_right = answer == last.ground_truth
        state.append(replace(last, is_correct=is_right))
        step_reward = 0.0 if is_right and not last.is_correct else NO_IMPROVEMENT_REWARD
        if answer is None:
            return ToolResponse(
                text="There is no number in this answer.",
                status=ToolStatus.user_error,
                step_reward=step_reward,
            )
        text = f"The answer {_format_number(answer)} is {'right' if is_right else 'wrong'}."
        return ToolResponse(text=text, step_reward=step_reward, metrics={"right": float(is_right)})

    async def fork(self, state: list[_AnswerCheck]) -> list[_AnswerCheck]:
        """Copy the list of checks."""
        return list(state)

    async def calc_reward(self, state: list[_AnswerCheck], kwargs: Mapping[str, Any]) -> float:
        """Return 1 if the last answer was right, else 0."""
        return float(state[-1].is_correct)


def parse_answer(text: str) -> Fraction | None:
    """Return the value of the last number in the text, or None if there is none."""
    numbers = _NUMBER_PATTERN.findall(text)
    if not numbers:
        return None
    number, _, denominator = numbers[-1].replace(",", "").replace("$", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(number) / int(denominator or 1)


def parse_ground_truth(kwargs: Mapping[str, Any], where: str) -> Fraction:
    """Return the `ground_truth` of a prompt's kwargs, a number or a solution that ends in one.

    Raises:
        ValueError: there is no ground truth, or it has no number; the message begins with `where`.
    """
    value = kwargs.get("ground_truth")
    truth = parse_answer(str(value).rpartition("####")[2]) if value is not None else None
    if truth is None:
        expected = "a number or a solution that ends in '#### number'"
        cause = "the dataset was made for another tool or interaction"
        raise InputError(f"{where}.ground_truth", value, expected, cause)
    return truth


def _format_number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"

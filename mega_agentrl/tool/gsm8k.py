"""A checker of numeric answers, as an example of a tool of one's own.

The prompt's `create_kwargs` hold the `ground_truth`: a number, or a solution that ends in
`#### number`, as in the GSM8K dataset. The policy may hand in as many answers as it likes and is
told whether the last one was right. Step reward: 0 for an answer that improves on the one before
(wrong, or none, to right), else `WORSE`, so that guessing costs something. Final reward: 1 where
the last answer is right, else 0.

Answers compare as numbers: 18, $18.00, 18% and 36/2 are equal; the last number of a text counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

WORSE = -0.05
MAX_ANSWER_CHARS = 2000

# At most 30 digits a part: nobody makes us compute with a number of a million digits.
_NUMBER = re.compile(
    r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{1,30})?(?:/\d{1,30})?(?!\d)"
)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Checked:
    truth: Fraction
    is_right: bool = False


class Gsm8kTool(Tool):
    """Tells whether an answer is right, and rewards the last one."""

    name = "gsm8k"
    description = "Checks a numeric answer to the question."
    argument = "answer"

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """The ground truth must be there and be a number."""
        _truth(kwargs.get("create_kwargs") or {})

    async def create(self, kwargs: Mapping[str, Any]) -> list[_Checked]:
        """The checks so far. kwargs: `ground_truth`."""
        return [_Checked(truth=_truth(kwargs))]

    async def execute(
        self, state: list[_Checked], arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Check `arguments["answer"]`."""
        last = state[-1]
        answer = parse_answer(str(arguments["answer"])[-MAX_ANSWER_CHARS:])
        is_right = answer == last.truth
        state.append(replace(last, is_right=is_right))
        step_reward = 0.0 if is_right and not last.is_right else WORSE
        if answer is None:
            return ToolAnswer(
                text="There is no number in this answer.",
                status=ToolStatus.user_error,
                step_reward=step_reward,
            )
        text = f"The answer {_shown(answer)} is {'right' if is_right else 'wrong'}."
        return ToolAnswer(text=text, step_reward=step_reward, metrics={"right": float(is_right)})

    async def fork(self, state: list[_Checked]) -> list[_Checked]:
        """Checks of the fork's own from here on."""
        return list(state)

    async def calc_reward(self, state: list[_Checked], kwargs: Mapping[str, Any]) -> float:
        """1 where the last answer was right."""
        return float(state[-1].is_right)


def parse_answer(text: str) -> Fraction | None:
    """Value of the last number in the text; None where there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number, _, denominator = found[-1].replace(",", "").replace("$", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(number) / int(denominator or 1)


def _truth(kwargs: Mapping[str, Any]) -> Fraction:
    given = kwargs.get("ground_truth")
    truth = parse_answer(str(given).rpartition("####")[2]) if given is not None else None
    if truth is None:
        raise ValueError(
            f"tool gsm8k: create_kwargs.ground_truth is {given!r}, expected a number or a "
            "solution that ends in '#### number'; probable cause: the dataset was made for "
            "another tool"
        )
    return truth


def _shown(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"

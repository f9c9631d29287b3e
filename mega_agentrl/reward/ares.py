"""ARES's accuracy: 1 where the final answer is the true one, else 0 (arXiv 2510.08457).

The answer is the last `\\boxed{...}` of the response, or where there is none what follows the last
`</think>`. Two answers are the same where they are the same number (1,000 and 1000.0, 0.5 and
\\frac{1}{2}, 50% and 50), or the same text without LaTeX's dress: delimiters, spacing, \\text,
\\left and \\right, outer braces, case. There is no algebra: x + 1 is not 1 + x.

What a data set's own grader found can be handed in. The released code grades an answer again
where that is 0, `regrade_zero`. The shaping on top is in `algo.ares_reward`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.reward.token_f1 import parse_number
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Sequence

_DRESS = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;:()\[\]]|\$|~")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_NUMBER_TOLERANCE = 1e-6


def accuracy(
    response: str,
    ground_truth: str | Sequence[str],
    *,
    supplied: float | None = None,
    regrade_zero: bool = False,
    threshold: float = 1.0,
) -> Score:
    """The accuracy of a decoded response as a score of 0 or 1, or what was supplied.

    ground_truth: of several texts any one will do. supplied: an accuracy found elsewhere, used
    as it is, except for 0 with `regrade_zero`. threshold: accuracy from which it is correct.
    """
    answer = final_answer(response)
    if supplied is not None and (supplied or not regrade_zero):
        value, reason = float(supplied), "supplied"
    else:
        truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
        value = 1.0 if any(same_answer(answer, truth) for truth in truths) else 0.0
        reason = "right answer" if value else "wrong answer"
    return Score(value=value, correct=value >= threshold, f1=value, answer=answer, reason=reason)


def final_answer(response: str) -> str:
    """The last balanced `\\boxed{...}`, else the text behind the last `</think>`, stripped."""
    opened: list[tuple[int, bool]] = []
    best = None
    boxes = {match.end() - 1 for match in re.finditer(r"\\boxed\s*\{", response)}
    for match in re.finditer(r"[{}]", response):
        position = match.start()
        if match[0] == "{":
            opened.append((position, position in boxes))
        elif opened:
            start, boxed = opened.pop()
            if boxed and (best is None or start > best[0]):
                best = (start, position)
    if best is None:
        return response.rpartition("</think>")[2].strip()
    return response[best[0] + 1 : best[1]].strip()


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers say the same; an empty one is never right."""
    plain, plain_truth = _plain(answer), _plain(truth)
    if not plain or not plain_truth:
        return False
    number, true_number = parse_number(plain), parse_number(plain_truth)
    if number is None or true_number is None:
        return plain == plain_truth
    return abs(number - true_number) <= _NUMBER_TOLERANCE * max(1.0, abs(true_number))


def _plain(text: str) -> str:
    """The answer without its dress, in lower case and without spaces."""
    text = text.replace("\\%", "%").replace("\\$", "$").replace("{,}", ",")
    text = _WRAPPED.sub(r"\1", _DRESS.sub("", text))
    text = _SHORT_FRACTION.sub(r"\1/\2", _FRACTION.sub(_as_quotient, text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", text)
    text = re.sub(r"\s+", "", text).lower().rstrip(".")
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    return text


def _as_quotient(match: re.Match[str]) -> str:
    top, bottom = match.groups()
    simple = re.fullmatch(r"[\s\d.]+/[\s\d.]+", f"{top}/{bottom}") is not None
    return f"{top}/{bottom}" if simple else f"({top})/({bottom})"

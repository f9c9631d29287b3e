r"""Binary answer accuracy for ARES (arXiv 2510.08457).

The answer is the content of the last `\boxed{...}` of the response or, without one, the text after
the last `</think>`. Two answers match if they are equal as numbers (1,000 and 1000.0, 0.5 and
\frac{1}{2}, 50% and 50), or as text without LaTeX formatting: delimiters, spacing, \text, \left
and \right, outer braces, case. There is no algebra: x + 1 does not match 1 + x. ARES's reward
shaping is in `algo.ares.reward`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.reward.answer_match import parse_number
from mega_agentrl.reward.registry import assistant_text, register_reward
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Trajectory

_LATEX_FORMATTING = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;:()\[\]]|\$|~"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_LATEX_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_NUMBER_TOLERANCE = 1e-6


def accuracy(response: str, ground_truth: str | Sequence[str], *, threshold: float = 1.0) -> Score:
    """Score a decoded response with 1 or 0.

    Args:
        response: the decoded response.
        ground_truth: the true answer, or several of which one must match.
        threshold: the answer is correct if the score is at least this.
    """
    answer = final_answer(response)
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    value = 1.0 if any(answers_match(answer, truth) for truth in truths) else 0.0
    reason = "right answer" if value else "wrong answer"
    return Score(value=value, correct=value >= threshold, f1=value, answer=answer, reason=reason)


@register_reward("accuracy")
def _accuracy_part(trajectory: Trajectory, config: RewardConfig) -> Score:
    truth = trajectory.prompt.ground_truth
    return accuracy(assistant_text(trajectory), truth, threshold=config.correct_threshold)


def final_answer(response: str) -> str:
    r"""Return the last balanced `\boxed{...}`, else the text after the last `</think>`."""
    open_braces: list[tuple[int, bool]] = []
    last_box = None
    box_starts = {match.end() - 1 for match in re.finditer(r"\\boxed\s*\{", response)}
    for match in re.finditer(r"[{}]", response):
        position = match.start()
        if match[0] == "{":
            open_braces.append((position, position in box_starts))
        elif open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last_box is None or start > last_box[0]):
                last_box = (start, position)
    if last_box is None:
        return response.rpartition("</think>")[2].strip()
    return response[last_box[0] + 1 : last_box[1]].strip()


def answers_match(answer: str, truth: str) -> bool:
    """Return whether two answers match; an empty answer never does."""
    answer_text, truth_text = _strip_latex(answer), _strip_latex(truth)
    if not answer_text or not truth_text:
        return False
    number, true_number = parse_number(answer_text), parse_number(truth_text)
    if number is None or true_number is None:
        return answer_text == truth_text
    return abs(number - true_number) <= _NUMBER_TOLERANCE * max(1.0, abs(true_number))


def _strip_latex(text: str) -> str:
    """Return the answer in lower case without LaTeX formatting and spaces."""
    text = text.replace("\\%", "%").replace("\\$", "$").replace("{,}", ",")
    text = _LATEX_TEXT_COMMAND.sub(r"\1", _LATEX_FORMATTING.sub("", text))
    text = _SHORT_FRACTION.sub(r"\1/\2", _FRACTION.sub(_fraction_to_quotient, text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", text)
    text = re.sub(r"\s+", "", text).lower().rstrip(".")
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    return text


def _fraction_to_quotient(match: re.Match[str]) -> str:
    numerator, denominator = match.groups()
    is_numeric = re.fullmatch(r"[\s\d.]+/[\s\d.]+", f"{numerator}/{denominator}") is not None
    return f"{numerator}/{denominator}" if is_numeric else f"({numerator})/({denominator})"

r"""Binary answer accuracy, for ARES (arXiv 2510.08457) and for questions with a short answer.

The answer is what the last of these in the policy's text gives:

    \boxed{34}  \fbox{34}      the content of the box
    Answer: 34                 the rest of the last line after the last `</think>`, as DAPO's and
                               other prompts ask for; also `The answer is 34`, `**Answer:** $34$`
    #### 34                    the rest of the last line, as GSM8K's prompts ask for

Without any of them it is the text after the last `</think>`. An empty answer is wrong.
`matching.matcher` compares it with the ground truth. ARES's reward shaping is in
`algo.ares.reward`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from mega_agentrl.reward.matching.matcher import grade_answer, map_grade
from mega_agentrl.reward.registry import assistant_text, check_answers, register_reward
from mega_agentrl.types.ground_truth import accepted_answers
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Trajectory

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_THINK_END = "</think>"
_MAX_TOKEN_CHARS = 100
_CONTROL_TOKEN = re.compile(r"(?:<\|[^|<>]*\|>|</?s>|</?answer>)\s*$")
_ANSWER_LINE = re.compile(
    r"[\s>*_#-]*(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+)?answer[*_]*\s*"
    r"(?:is(?![a-z])\s*:?|:|=)[*_]*\s*(.*)",
    re.IGNORECASE,
)
_HASH_LINE = re.compile(r".*####\s*(.*)")


def accuracy(
    response: str, truths: Sequence[str], *, threshold: float = 1.0
) -> Score | Future[Score]:
    """Score a decoded response with 1 or 0.

    Args:
        response: the decoded response.
        truths: the accepted answers, of which one must match.
        threshold: the answer is correct if the score is at least this.

    Returns:
        The score, or its future if the answer and a truth are expressions.
    """
    answer = final_answer(response)
    grade = grade_answer(answer, truths, lambda answer, truth: 0.0)
    return map_grade(grade, partial(_to_score, answer, threshold))


@register_reward("accuracy", check=check_answers)
def _accuracy_part(trajectory: Trajectory, config: RewardConfig) -> Score | Future[Score]:
    truths = accepted_answers(trajectory.prompt.ground_truth)
    return accuracy(assistant_text(trajectory), truths, threshold=config.correct_threshold)


def final_answer(response: str) -> str:
    """Return the answer that a response states last, see the module."""
    box = _last_box(response)
    thought_end = response.rfind(_THINK_END) + len(_THINK_END) if _THINK_END in response else 0
    stated = _stated_answer(response[thought_end:])
    if box is None:
        return response[thought_end:].strip() if stated is None else stated
    start, stop = box
    if stated is not None and stop < response.rfind(stated):
        return stated
    return response[start:stop].strip()


def _stated_answer(text: str) -> str | None:
    """Return what the last line states as the answer, None if it states none.

    `Answer:` may stand on the line before.
    """
    text = text.rstrip()
    while match := _CONTROL_TOKEN.search(text[-_MAX_TOKEN_CHARS:]):
        text = text[: len(text) - len(match[0])].rstrip()
    before, _, line = text.rpartition("\n")
    match = _ANSWER_LINE.fullmatch(line) or _HASH_LINE.fullmatch(line)
    if match is None:
        heading = _ANSWER_LINE.fullmatch(before.rstrip().rpartition("\n")[2])
        return line.strip() if heading and not heading[1] else None
    answer = match[1].strip()
    return answer.rstrip("*_").rstrip() if line.lstrip().startswith(("*", "_")) else answer


def _last_box(response: str) -> tuple[int, int] | None:
    """Return start and stop of the content of the last box whose braces are balanced."""
    open_braces: list[tuple[int, bool]] = []
    last_box = None
    box_starts = {match.end() - 1 for match in _BOX.finditer(response)}
    for match in re.finditer(r"[{}]", response):
        position = match.start()
        if match[0] == "{":
            open_braces.append((position, position in box_starts))
        elif open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last_box is None or start >= last_box[0]):
                last_box = (start + 1, position)
    return last_box


def _to_score(answer: str, threshold: float, value: float) -> Score:
    reason = "right answer" if value else "wrong answer"
    return Score(value=value, correct=value >= threshold, f1=value, answer=answer, reason=reason)

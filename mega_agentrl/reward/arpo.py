r"""ARPO's reward (arXiv 2507.19849), in the released and a strict variant.

    reward = -1                  bad format
             F1 + 0.1            F1 > 0 and both search and Python were used
             F1                  otherwise

The format requires: `<think>` and `</think>` equally often and at least once; `<answer>` and
`</answer>` once each, in order, with a balanced `\boxed{...}` between them; every call followed by
its closing tag and a `<result>` block. The answer is the content of the last `\boxed`.

`score` reads the decoded response with tool results, as the released code does. So a tool result
can break the format, merely writing `</search>` and `</python>` earns the bonus, and numbers lose
sign and decimal point. `score_trajectory` reads only what the model wrote, requires calls that ran
successfully, treats a `<result>` written by the model as bad format, and compares answers as
`matching.matcher` says: the F1 over words remains for answers in words only, and numbers between
words count by their value. Neither raises for what the policy wrote.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mega_agentrl.reward.matching.matcher import grade_answer, map_grade
from mega_agentrl.reward.matching.words import number_aware_f1, token_f1
from mega_agentrl.reward.registry import check_answers, register_reward
from mega_agentrl.types.ground_truth import accepted_answers
from mega_agentrl.types.records import Role, Score, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Trajectory

MULTI_TOOL_BONUS = 0.1
_TOOL_NAMES = ("search", "python")
_EMPTY_RESULT = " <result></result>"


class _FormatError(ValueError):
    """The response has a bad format; the message is the reason."""


def score(response: str, ground_truth: str | Sequence[str], threshold: float = 1.0) -> Score:
    """Score a decoded response by the released rule.

    Args:
        response: the decoded response with tool results.
        ground_truth: the true answer, or several of which the best match counts.
        threshold: lowest token F1 of a correct answer.
    """
    try:
        answer = parse_answer(response)
    except _FormatError as error:
        return _bad_format_score(error)
    used_both = all(f"</{name}>" in response for name in _TOOL_NAMES)
    f1 = token_f1(answer, ground_truth)
    return _f1_score(answer, f1, used_both=used_both, threshold=threshold)


def score_trajectory(trajectory: Trajectory, threshold: float = 1.0) -> Score | Future[Score]:
    """Score a trajectory by the text of its assistant turns and the outcomes of its tool calls.

    Args:
        trajectory: the finished trajectory.
        threshold: lowest F1 of a correct answer.

    Returns:
        The score, or its future if the answer and a ground truth are expressions.
    """
    parts: list[str] = []
    successful_tools: set[str] = set()
    for turn in trajectory.turns:
        if turn.role is Role.assistant:
            if "<result>" in turn.text or "</result>" in turn.text:
                return _bad_format_score(
                    _FormatError("bad format: the model wrote a result itself")
                )
            parts.append(turn.text)
        elif turn.role is Role.tool:
            parts.append(_EMPTY_RESULT)
            if turn.outcome is not None and turn.outcome.status is ToolStatus.ok:
                successful_tools.add(turn.outcome.tool)
    try:
        answer = parse_answer("".join(parts))
    except _FormatError as error:
        return _bad_format_score(error)
    truths = accepted_answers(trajectory.prompt.ground_truth)
    used_both = successful_tools.issuperset(_TOOL_NAMES)
    to_score = partial(_f1_score, answer, used_both=used_both, threshold=threshold)
    return map_grade(grade_answer(answer, truths, number_aware_f1), to_score)


@register_reward("arpo_released", check=check_answers)
def _released_part(trajectory: Trajectory, config: RewardConfig) -> Score:
    truths = accepted_answers(trajectory.prompt.ground_truth)
    return score(trajectory.response_text, truths, config.correct_threshold)


@register_reward("arpo", check=check_answers)
def _strict_part(trajectory: Trajectory, config: RewardConfig) -> Score | Future[Score]:
    return score_trajectory(trajectory, config.correct_threshold)


def parse_answer(text: str) -> str:
    """Return the boxed answer of a well-formed text; raise `_FormatError` for any other text."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close:
        raise _FormatError("bad format: <think> </think> not paired")
    if num_open == 0:
        raise _FormatError("bad format: <think> or </think> not found")
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        raise _FormatError("bad format: <answer> or </answer> not found")
    for name in _TOOL_NAMES:
        _check_call_format(text, name)
    start, stop = text.index("<answer>"), text.index("</answer>")
    if start > stop:
        raise _FormatError("bad format: <answer> must be before </answer>")
    inner = text[start + len("<answer>") : stop]
    if "\\boxed{" not in inner or "}" not in inner:
        raise _FormatError("bad format: answer is missing \\boxed{} format")
    return last_boxed(inner)


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`; raise `_FormatError` if it is unbalanced.

    If the text contains `\boxed ` with a space, return what follows its last occurrence, up to a
    `$`.
    """
    spaced_command = "\\boxed "
    if spaced_command in text:
        return text.rsplit(spaced_command, 1)[1].split("$", 1)[0]
    start = text.rindex("\\boxed") + len("\\boxed")
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0 and text[start] == "{":
            return text[start + 1 : position]
    raise _FormatError("bad format: the last \\boxed is not balanced")


def _check_call_format(text: str, name: str) -> None:
    """Check that each opening tag is followed by its closing tag and a result block.

    Scanning continues after that result, so two calls may share one, as in the released code.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    start = text.find(opening)
    while start >= 0:
        result = text.find("<result>", start)
        close = text.find(closing, start)
        end = text.find("</result>", result) if result >= 0 else -1
        if min(result, close, end) < 0:
            raise _FormatError(f"bad format: {name}/result tags are incomplete")
        if not start < close < result < end:
            raise _FormatError(f"bad format: {name}/result tags are nested in the wrong order")
        start = text.find(opening, end + len("</result>"))


def _bad_format_score(error: _FormatError) -> Score:
    return Score(value=-1.0, correct=False, f1=0.0, answer="", reason=str(error))


def _f1_score(answer: str, f1: float, *, used_both: bool, threshold: float) -> Score:
    if f1 <= 0:
        value, reason = 0.0, f"wrong answer but good format: {answer}"
    elif used_both:
        value = f1 + MULTI_TOOL_BONUS
        reason = (
            f"correct answer and calling search and python at the same time, get score: {value}"
        )
    else:
        value, reason = f1, f"correct answer, get f1 score: {f1}"
    correct = f1 > 0 and f1 >= threshold
    return Score(value=value, correct=correct, f1=f1, answer=answer, reason=reason)

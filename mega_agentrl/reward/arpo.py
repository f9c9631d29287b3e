"""ARPO's reward (arXiv 2507.19849), as released and strict.

    reward = -1                  bad format
             F1 + 0.1            F1 > 0 and both search and Python were used
             F1                  otherwise

Format: `<think>` and `</think>` equally often and at least once; `<answer>` and `</answer>`
once each, in order, with a balanced `\\boxed{...}` between; every call followed by its close
and a `<result>` block. The answer is the last `\\boxed`.

`score` reads the decoded response, tool results included, as the released code does: a result
can void the episode, merely writing `</search>` and `</python>` earns the bonus, and numbers
lose sign and decimal point. `score_strict` reads what the model wrote only, wants calls that
really ran, treats a `<result>` written by the model as bad format, and compares numbers as
numbers: an answer that is one number is right or wrong as a whole (`same_number`), numbers among
words count by their value. Neither raises for what the policy wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.reward.same_number import same_number
from mega_agentrl.reward.token_f1 import number_aware_f1, token_f1
from mega_agentrl.types.records import Author, Score, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.records import Trajectory

BONUS = 0.1
_CALLS = ("search", "python")
_RESULT = " <result></result>"


class _FormatError(ValueError):
    """Bad format; the message is the reason."""


def score(response: str, ground_truth: str | Sequence[str], threshold: float = 1.0) -> Score:
    """Score a decoded response by the released rule.

    threshold: token F1 from which the answer counts as correct.
    """
    try:
        answer = checked_answer(response)
    except _FormatError as error:
        return _bad(error)
    used_both = all(f"</{name}>" in response for name in _CALLS)
    return _graded(answer, token_f1(answer, ground_truth), used_both, threshold)


def score_strict(trajectory: Trajectory, threshold: float = 1.0) -> Score:
    """Score a trajectory by what its assistant turns say and its tools really did."""
    parts: list[str] = []
    ran: set[str] = set()
    for turn in trajectory.turns:
        if turn.author is Author.assistant:
            if "<result>" in turn.text or "</result>" in turn.text:
                return _bad(_FormatError("bad format: the model wrote a result itself"))
            parts.append(turn.text)
        elif turn.author is Author.tool:
            parts.append(_RESULT)
            if turn.outcome is not None and turn.outcome.status is ToolStatus.ok:
                ran.add(turn.outcome.tool)
    try:
        answer = checked_answer("".join(parts))
    except _FormatError as error:
        return _bad(error)
    truth = trajectory.prompt.ground_truth
    truths = [truth] if isinstance(truth, str) else truth
    f1 = max((_strict_f1(answer, one) for one in truths), default=0.0)
    return _graded(answer, f1, ran.issuperset(_CALLS), threshold)


def _strict_f1(answer: str, truth: str) -> float:
    same = same_number(answer, truth)
    return number_aware_f1(answer, truth) if same is None else float(same)


def checked_answer(text: str) -> str:
    """The boxed answer of a well-formed text; raises `_FormatError` with the reason."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close:
        raise _FormatError("bad format: <think> </think> not paired")
    if num_open == 0:
        raise _FormatError("bad format: <think> or </think> not found")
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        raise _FormatError("bad format: <answer> or </answer> not found")
    for name in _CALLS:
        _check_calls(text, name)
    start, stop = text.index("<answer>"), text.index("</answer>")
    if start > stop:
        raise _FormatError("bad format: <answer> must be before </answer>")
    inner = text[start + len("<answer>") : stop]
    if "\\boxed{" not in inner or "}" not in inner:
        raise _FormatError("bad format: answer is missing \\boxed{} format")
    return last_boxed(inner)


def last_boxed(text: str) -> str:
    """Content of the last `\\boxed{...}`; where the literal `\\boxed ` with a space occurs,
    what follows its last occurrence up to a `$`. Raises `_FormatError` where it is unbalanced.
    """
    spaced = "\\boxed "
    if spaced in text:
        return text.rsplit(spaced, 1)[1].split("$", 1)[0]
    start = text.rindex("\\boxed") + len("\\boxed")
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0 and text[start] == "{":
            return text[start + 1 : position]
    raise _FormatError("bad format: the last \\boxed is not balanced")


def _check_calls(text: str, name: str) -> None:
    """Each opening tag needs, from there on, its close, a result and the result's close.

    Scanning goes on after that result, so two calls may share one, as released.
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


def _bad(error: _FormatError) -> Score:
    return Score(value=-1.0, correct=False, f1=0.0, answer="", reason=str(error))


def _graded(answer: str, f1: float, used_both: bool, threshold: float) -> Score:
    if f1 <= 0:
        value, reason = 0.0, f"wrong answer but good format: {answer}"
    elif used_both:
        value = f1 + BONUS
        reason = (
            f"correct answer and calling search and python at the same time, get score: {value}"
        )
    else:
        value, reason = f1, f"correct answer, get f1 score: {f1}"
    correct = f1 > 0 and f1 >= threshold
    return Score(value=value, correct=correct, f1=f1, answer=answer, reason=reason)

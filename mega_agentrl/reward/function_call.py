"""EGPO's binary reward for function calling (arXiv 2508.05118).

`match="ast"` parses the calls after the last `</think>` (`call_parser`) and compares them with the
expected ones as a multiset, or in order with `ordered`. The reasoning must be closed, but its
opening tag may be part of the chat template. If the ground truth holds no calls, the answer must
hold none.

`match="bfcl"` compares arguments as BFCL's checker does: texts without case, spaces and the
characters `,./-_*^`, single and double quotes alike; and the text "5" is not the number 5, which
`ast` takes it for.

A ground truth may accept several values of an argument (`accepted_calls`).

`match="string"` is the published rule: the response contains `<think>`, `</think>` and text that
matches `_CALL_PATTERN`, and the text after the last `</think>` equals the ground truth up to
whitespace. Key order and quotes matter.

A response never raises an error, whatever the policy wrote; a ground truth that cannot be parsed
raises one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.errors import InputError
from mega_agentrl.reward.accepted_calls import AcceptedCall, calls_match, parse_expected_calls
from mega_agentrl.reward.call_parser import (
    CallParseError,
    NormalizedValue,
    parse_calls,
    read_word,
)
from mega_agentrl.reward.registry import assistant_text, register_reward
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.types.records import Prompt, Trajectory

MATCH_MODES = ("ast", "bfcl", "string")
_BFCL_IGNORED = re.compile(r"[ ,./\-_*^]")
_THINK_START, _THINK_END = "<think>", "</think>"
_CALL_PATTERN = re.compile(
    r"\[\w+\s*\([^)]*\)\]" r"|\{\s*[\"']name[\"']\s*:" r"|[\"']function[\"']\s*:", re.IGNORECASE
)


def score(
    solution: str,
    ground_truth: str | Sequence[str],
    *,
    match: str = "ast",
    ordered: bool = False,
) -> Score:
    """Score a decoded response with 1 or 0.

    Args:
        solution: the decoded response.
        ground_truth: the expected calls as text, or several texts of which one must match.
        match: one of `MATCH_MODES`.
        ordered: whether the calls must come in the expected order (not with `string`).

    Raises:
        ValueError: `match` is unknown, or the ground truth cannot be parsed.
    """
    if match not in MATCH_MODES:
        raise InputError("match", match, f"one of {', '.join(MATCH_MODES)}")
    truths = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    answer = solution.rpartition(_THINK_END)[2].strip()
    if match == "string":
        return _string_score(solution, answer, truths)
    expected_calls = [_parse_ground_truth(truth) for truth in truths]
    if _THINK_END not in solution:
        return _binary_score(False, answer, "bad format: the reasoning is not closed by </think>")
    try:
        calls = parse_calls(answer)
    except CallParseError as error:
        return _binary_score(False, answer, f"bad format: {error}")
    equal = _equal_for_bfcl if match == "bfcl" else _equal
    if any(
        calls_match(calls, expected, ordered=ordered, equal=equal) for expected in expected_calls
    ):
        return _binary_score(True, answer, f"the {len(calls)} expected calls")
    names = ", ".join(call.name for call in calls) or "none"
    return _binary_score(False, answer, f"wrong calls: got {names}")


def _check_prompt(prompt: Prompt, config: RewardConfig) -> None:
    """Raise `ValueError` if calls are compared and the ground truth cannot be parsed as calls."""
    if config.function_call_match is not FunctionCallMatch.string:
        truths = prompt.ground_truth
        for truth in [truths] if isinstance(truths, str) else truths:
            _parse_ground_truth(truth)


@register_reward("function_call", check=_check_prompt)
def _function_call_part(trajectory: Trajectory, config: RewardConfig) -> Score:
    match = config.function_call_match
    return score(
        assistant_text(trajectory),
        trajectory.prompt.ground_truth,
        match="ast" if match is FunctionCallMatch.ast_ordered else str(match),
        ordered=match is FunctionCallMatch.ast_ordered,
    )


def _string_score(solution: str, answer: str, truths: Sequence[str]) -> Score:
    if _THINK_START not in solution or _THINK_END not in solution:
        return _binary_score(False, answer, "bad format: <think> or </think> not found")
    if not _CALL_PATTERN.search(solution):
        return _binary_score(False, answer, "bad format: no text that looks like a call")
    expected_texts = {" ".join(truth.split()) for truth in truths} - {""}
    is_equal = " ".join(answer.split()) in expected_texts
    reason = "the text of the ground truth" if is_equal else "not the text of the ground truth"
    return _binary_score(is_equal, answer, reason)


def _parse_ground_truth(truth: str) -> list[AcceptedCall]:
    try:
        calls = parse_expected_calls(truth)
    except CallParseError as error:
        raise InputError("ground_truth", truth, "calls", str(error)) from error
    if not calls and truth.strip() not in ("", "[]"):
        raise InputError("ground_truth", truth, "calls", "there are none in it")
    return calls


def _equal(accepted: NormalizedValue, value: NormalizedValue) -> bool:
    """Return whether values are equal; a number may be given as a text, but two texts are texts."""
    if accepted[0] == "text" and value[0] in ("number", "bool"):
        return read_word(accepted[1]) == value
    if value[0] == "text" and accepted[0] in ("number", "bool"):
        return accepted == read_word(value[1])
    return accepted == value


def _equal_for_bfcl(accepted: NormalizedValue, value: NormalizedValue) -> bool:
    """Return whether values are of one type and equal, texts in what BFCL's checker compares."""
    return _reduce_text(accepted) == _reduce_text(value)


def _reduce_text(value: NormalizedValue) -> NormalizedValue:
    if value[0] != "text":
        return value
    return ("text", _BFCL_IGNORED.sub("", value[1]).lower().replace("'", '"'))


def _binary_score(is_correct: bool, answer: str, reason: str) -> Score:
    value = 1.0 if is_correct else 0.0
    return Score(value=value, correct=is_correct, f1=value, answer=answer, reason=reason)

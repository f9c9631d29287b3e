"""EGPO's binary reward for function calling (arXiv 2508.05118): 1 for the right calls, else 0.

`match="ast"` compares what is called: the calls behind the last `</think>`, read by `call_text`,
must be the expected ones, as a multiset, or in order with `ordered`. The reasoning must be
closed; its opening marker may have been the template's. Where the ground truth holds no call, an
answer without one is right.

`match="string"` is the published port: `<think>` and `</think>` and something like a call occur
anywhere, and what stands behind the last `</think>` equals the ground truth once whitespace is
collapsed. Key order, quotes and any further word count there.

Nothing the policy writes raises; a ground truth that holds no calls and is not empty does.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.reward.call_text import Call, CallError, read_calls
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Sequence

MATCHES = ("ast", "string")
_OPEN, _CLOSE = "<think>", "</think>"
_LIKE_A_CALL = re.compile(
    r"\[\w+\s*\([^)]*\)\]" r"|\{\s*[\"']name[\"']\s*:" r"|[\"']function[\"']\s*:", re.IGNORECASE
)


def score(
    solution: str,
    ground_truth: str | Sequence[str],
    *,
    match: str = "ast",
    ordered: bool = False,
) -> Score:
    """1 or 0 for a decoded response.

    ground_truth: the expected calls as text; of several texts any one will do. match: `ast` or
    `string`. ordered: the calls must come in the expected order (`ast` only). Raises `ValueError`
    for a ground truth that cannot be read.
    """
    if match not in MATCHES:
        raise ValueError(f"match={match}: expected one of {', '.join(MATCHES)}")
    truths = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    answer = solution.rpartition(_CLOSE)[2].strip()
    if match == "string":
        return _string_score(solution, answer, truths)
    expected = [_expected(truth) for truth in truths]
    if _CLOSE not in solution:
        return _score(False, answer, "bad format: the reasoning is not closed by </think>")
    try:
        calls = read_calls(answer)
    except CallError as error:
        return _score(False, answer, f"bad format: {error}")
    if any(_same(calls, wanted, ordered=ordered) for wanted in expected):
        return _score(True, answer, f"the {len(calls)} expected calls")
    names = ", ".join(call.name for call in calls) or "none"
    return _score(False, answer, f"wrong calls: got {names}")


def check_ground_truth(ground_truth: str | Sequence[str]) -> None:
    """Raise `ValueError` where `score` with `ast` would, for what is no call."""
    for truth in [ground_truth] if isinstance(ground_truth, str) else ground_truth:
        _expected(truth)


def _string_score(solution: str, answer: str, truths: Sequence[str]) -> Score:
    if _OPEN not in solution or _CLOSE not in solution:
        return _score(False, answer, "bad format: <think> or </think> not found")
    if not _LIKE_A_CALL.search(solution):
        return _score(False, answer, "bad format: nothing like a call")
    wanted = {" ".join(truth.split()) for truth in truths} - {""}
    right = " ".join(answer.split()) in wanted
    return _score(right, answer, "equal text" if right else "other text")


def _expected(truth: str) -> list[Call]:
    try:
        calls = read_calls(truth)
    except CallError as error:
        raise ValueError(f"ground_truth: got {truth[:200]!r}, expected calls; {error}") from error
    if not calls and truth.strip() not in ("", "[]"):
        raise ValueError(f"ground_truth: got {truth[:200]!r}, expected calls and found none")
    return calls


def _same(calls: list[Call], wanted: list[Call], *, ordered: bool) -> bool:
    return calls == wanted if ordered else Counter(calls) == Counter(wanted)


def _score(right: bool, answer: str, reason: str) -> Score:
    value = 1.0 if right else 0.0
    return Score(value=value, correct=right, f1=value, answer=answer, reason=reason)

"""Tool calls of a turn: order, refusals, and truncation of answers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.rollout.conversation.tool_calls import (
    MAX_CHARS_PER_TOKEN,
    TRUNCATION_NOTE,
    call_limit_outcome,
    run_tool_calls,
    truncate_to_fit,
)
from mega_agentrl.types.records import InvalidToolCall, ToolCall, ToolOutcome, ToolStatus

BAD = InvalidToolCall(tool="unnamed", message="no JSON")


def _outcome(answer):
    return ToolOutcome(tool="t", status=ToolStatus.ok, answer=answer, latency_s=0.0)


class Sleeper:
    """Answers after as many milliseconds as it is told."""

    def __init__(self):
        self.running = self.most = 0

    async def execute(self, tool, arguments):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(arguments["ms"] / 1000)
        self.running -= 1
        if tool == "bug":
            raise KeyError("wrong_name")
        return _outcome(str(arguments["ms"]))


def _calls(*ms, tool="t"):
    return [ToolCall(tool=tool, arguments={"ms": one}) for one in ms]


async def test_calls_run_at_once_and_are_answered_in_order():
    sleeper = Sleeper()
    first, *rest = _calls(30, 1, 10)
    got = await run_tool_calls(sleeper, [first, BAD, *rest])
    assert [outcome.answer for outcome in got] == ["30", "no JSON", "1", "10"]
    assert [outcome.is_invalid_call for outcome in got] == [False, True, False, False]
    assert sleeper.most == 3
    assert await run_tool_calls(sleeper, []) == []


async def test_a_bug_arrives_as_itself_and_ends_the_others():
    sleeper = Sleeper()
    begin_s = asyncio.get_running_loop().time()
    with pytest.raises(KeyError) as caught:
        await run_tool_calls(sleeper, [*_calls(300_000), *_calls(1, tool="bug")])
    assert caught.value.args == ("wrong_name",)
    assert asyncio.get_running_loop().time() - begin_s < 60


def test_a_refused_call_has_a_reason_and_stays_invalid_if_it_was():
    outcome = call_limit_outcome(ToolCall(tool="t", arguments={}), 3)
    assert "no more than 3 calls" in outcome.answer and not outcome.is_invalid_call
    invalid = call_limit_outcome(BAD, 3)
    assert invalid.is_invalid_call and invalid.status is ToolStatus.user_error


def _write(outcomes):
    """A token a character, and one in front of each answer."""
    texts = [f"-{outcome.answer}" for outcome in outcomes]
    return [ord(char) for char in "".join(texts)], texts


@given(st.lists(st.text(max_size=120), min_size=1, max_size=4), st.integers(-3, 200))
def test_truncated_answers_leave_room_for_a_token(answers, room):
    got = truncate_to_fit([_outcome(answer) for answer in answers], room, _write)
    if got is None:
        assert sum(map(len, answers)) + len(answers) > room - 1
        return
    token_ids, texts = got
    assert len(token_ids) <= room - 1 and len(texts) == len(answers)
    for text, answer in zip(texts, answers, strict=True):
        body = text[1:].removesuffix(TRUNCATION_NOTE)
        assert text == f"-{answer}" or (text.endswith(TRUNCATION_NOTE) and answer.startswith(body))


def test_truncation_shortens_long_answers_and_keeps_short_ones():
    answers = [_outcome("a" * 500), _outcome("b"), _outcome("a" * 400)]
    token_ids, texts = truncate_to_fit(answers, 100, _write)
    assert texts[1] == "-b" and texts[0].endswith("a" + TRUNCATION_NOTE) and len(token_ids) <= 50
    assert texts[0] == texts[2], "cut to the same length"


def test_ten_megabytes_are_never_tokenized_whole():
    seen = []

    def write(outcomes):
        seen.append(max(len(outcome.answer) for outcome in outcomes))
        return _write(outcomes)

    token_ids, _ = truncate_to_fit([_outcome("z" * 10_000_000)], 1000, write)
    assert 250 < len(token_ids) <= 500
    assert max(seen) <= 1000 * MAX_CHARS_PER_TOKEN + len(TRUNCATION_NOTE)

"""JSON calls: which are read, what the others are told, and that answers hold no tag."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.tool.call_protocol.hermes import UNKNOWN_TOOL, HermesProtocol
from mega_agentrl.tool.function import tool
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import InvalidToolCall, ToolCall, ToolStatus

PROTOCOL = HermesProtocol(["search", "area"], ["<|im_end|>"])
GOOD = '{"name": "search", "arguments": {"query": "a"}}'
WANTED = ToolCall(tool="search", arguments={"query": "a"})


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        (call(GOOD), [WANTED]),
        (f"text {call(GOOD)}\n{call(GOOD)} more", [WANTED, WANTED]),
        (f"<think>{call(GOOD)}</think> no", []),
        (f"<think>x</think>{call(GOOD)}", [WANTED]),
        (call('{"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}'), [WANTED]),
        (call('{"name": "now"}'), [ToolCall(tool="now", arguments={})]),
        ("</tool_call>", []),
    ],
)
def test_calls_in_order(text, expected):
    assert list(PROTOCOL.parse_calls(text)) == expected


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        ('{"name": "search", "arguments": {', "search", "not JSON"),
        ("search('a')", UNKNOWN_TOOL, "not JSON"),
        ("[1]", UNKNOWN_TOOL, "no name"),
        ('{"arguments": {}}', UNKNOWN_TOOL, "no name"),
        ('{"name": 3}', UNKNOWN_TOOL, "no name"),
        ('{"name": "search", "arguments": [1]}', "search", "not an object"),
        ('{"name": "search", "arguments": "a"}', "search", "not JSON"),
        ('{"name": "search", "arguments": {"x": NaN}}', "search", "NaN"),
        ("[" * 5000, UNKNOWN_TOOL, "not JSON"),
        ('{"name": "search", "arguments": {"x": ' + "9" * 5000 + "}}", "search", "not JSON"),
    ],
)
def test_invalid_calls_say_what_was_expected(body, name, what):
    (bad,) = PROTOCOL.parse_calls(call(body))
    assert isinstance(bad, InvalidToolCall) and bad.tool == name
    assert what in bad.message and '{"name": ..., "arguments": {...}}' in bad.message
    assert PROTOCOL.parse_calls(bad.message) == ()


def test_a_call_that_is_not_closed_does_not_hide_the_next():
    first, second = PROTOCOL.parse_calls("<tool_call>" + GOOD + call(GOOD))
    assert isinstance(first, InvalidToolCall) and "closing tag" in first.message
    assert second == WANTED


def test_half_a_surrogate_pair_becomes_a_question_mark_and_a_whole_one_stays():
    (got,) = PROTOCOL.parse_calls(
        call('{"name": "search", "arguments": {"q": "\\ud800 \\ud83d\\ude00"}}')
    )
    assert got.arguments == {"q": "? \U0001f600"}


def test_a_turn_ends_by_itself_and_answers_are_escaped():
    assert PROTOCOL.stop_strings == () and PROTOCOL.uses_tool_messages
    assert PROTOCOL.call_markers == ("<tool_call>", "</tool_call>")
    assert PROTOCOL.render("<tool_call> a < b <|im_end|>") == "&lt;tool_call> a < b &lt;|im_end|>"


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", GOOD, "{", '"', "x", "</think>"])))
def test_any_text_is_read(pieces):
    calls = PROTOCOL.parse_calls("".join(pieces))
    assert len(calls) <= pieces.count("<tool_call>")
    assert all(isinstance(one, ToolCall | InvalidToolCall) for one in calls)


@given(st.text(), st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=3))
def test_what_json_writes_is_read(before, arguments):
    body = json.dumps({"name": "search", "arguments": arguments})
    if "<tool_call>" in before + body or "</t" in body:
        return
    *_, last = PROTOCOL.parse_calls(before + call(body))
    expected = json.loads(body.encode("utf-8", "replace"))["arguments"]
    if "\\ud" not in body:
        assert last == ToolCall(tool="search", arguments=expected)


@tool
def area(width: float, height: float = 1.0) -> float:
    """Area of a rectangle."""
    return width * height


async def test_a_toolkit_called_by_json():
    toolkit = ToolKit([area], protocol=CallProtocol.hermes)
    assert toolkit.uses_tool_messages and toolkit.stop_strings == ()
    assert toolkit.parse_calls("none") == ()
    session = toolkit.open_session()
    await session.create({})
    for name, arguments, status, part in (
        ("area", {"width": 2, "height": 3}, ToolStatus.ok, "6"),
        ("area", {"width": "two"}, ToolStatus.user_error, "width"),
        ("volume<|im_end|>", {}, ToolStatus.user_error, "volume&lt;|im_end|>"),
    ):
        turn = call(json.dumps({"name": name, "arguments": arguments}))
        (parsed,) = toolkit.parse_calls(turn)
        assert parsed.tool == name
        outcome = await session.execute(parsed.tool, parsed.arguments)
        assert (outcome.status, outcome.is_invalid_call) == (status, status is not ToolStatus.ok)
        assert part in toolkit.render_outcome(outcome)

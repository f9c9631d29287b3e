"""JSON calls: which are read, what the others are told, and that answers hold no tag."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.tool.call_protocol.hermes import (
    MAX_UNREADABLE_CALLS,
    HermesProtocol,
    opened_reasoning,
    split_reasoning,
)
from mega_agentrl.tool.call_protocol.json_call import UNKNOWN_TOOL, format_call
from mega_agentrl.tool.call_protocol.json_text import MAX_DEPTH
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
        ("<tool_call>\n" + GOOD, [WANTED]),
        (f"{call(GOOD)}\n<tool_call>{GOOD} \n", [WANTED, WANTED]),
    ],
)
def test_calls_are_read_in_their_order(text, expected):
    assert list(PROTOCOL.parse_calls(text)) == expected


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        ('{"name": "search", "arguments": {', "search", "brace or bracket is missing"),
        ('{"name": "search", "arguments": {"query": "a"}', "search", "brace or bracket is missing"),
        (GOOD + "}", "search", "text behind its object"),
        ('{"name": "search", "arguments": {"query": "a}}', "search", "Unterminated string"),
        ("{'name': 'search', 'arguments': {}}", UNKNOWN_TOOL, "at character 2"),
        ('{"name": "search", "query": "a"}', "search", "no arguments, but query"),
        ('{"name": "search", "args": {"query": "a"}}', "search", "no arguments, but args"),
        ('{"name": "search", "arguments": {"x": 1e999}}', "search", "too large"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 300 + "]" * 300 + "}}", "f", "levels deep"),
        ('{"name": "f", "arguments": "' + "[" * 300 + '"}', "f", "not JSON"),
        ('{"name": ""}', UNKNOWN_TOOL, "no name"),
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


@pytest.mark.parametrize(
    "text",
    [
        "a </tool_call> b",
        "<tool_call>",
        call(GOOD),
        "<think> a </think> b",
        "</think>",
        '"}}\n</tool_call>',
        "\\",
        "a\nb",
    ],
)
@pytest.mark.parametrize("closing", ["\n</tool_call>", "</tool_call>\n", ""])
def test_a_call_ends_where_its_json_ends(text, closing):
    body = json.dumps({"name": "edit", "arguments": {"text": text}})
    turn = f"<think>so</think>\nI write. <tool_call>\n{body}{closing}"
    wanted = ToolCall(tool="edit", arguments={"text": text})
    assert PROTOCOL.parse_calls(turn) == (wanted,)
    parts = PROTOCOL.split_turn(turn)
    assert (parts.reasoning, parts.content, parts.calls) == ("so", "I write.", (wanted,))
    if closing:
        assert PROTOCOL.parse_calls(turn + call(GOOD)) == (wanted, WANTED)


def test_a_broken_call_is_one_call_whatever_its_texts_hold():
    body = '{"name": "edit", "arguments": {"text": "a </tool_call> <tool_call>' + "x" + '"}'
    broken, following = PROTOCOL.parse_calls(call(body) + call(GOOD))
    assert isinstance(broken, InvalidToolCall) and broken.tool == "edit"
    assert following == WANTED
    # The text of this one is not closed on its line, so that the next call is still found.
    broken, following = PROTOCOL.parse_calls(
        call('{"name": "edit", "arguments": {"text": "a}}') + call(GOOD)
    )
    assert isinstance(broken, InvalidToolCall) and following == WANTED


def test_an_unescaped_quote_in_a_text_does_not_make_a_part_of_the_text_a_call():
    body = (
        '{"name": "write", "arguments": {"text": "use ' + f"<tool_call>{GOOD}</tool_call>" + '"}}'
    )
    (broken,) = PROTOCOL.parse_calls(call(body))
    assert isinstance(broken, InvalidToolCall) and broken.tool == "write"


def test_any_number_of_broken_calls_is_read():
    for text in ("<tool_call>{", '<tool_call>"\\', '<tool_call>\\"', "<think>", '<tool_call>{"a'):
        calls = PROTOCOL.parse_calls(text * 2_000)
        assert all(isinstance(one, InvalidToolCall) for one in calls)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param('{"name": "search", "parameters": {"query": "a"}}', id="llama"),
        pytest.param(
            '{"name": "search", "arguments": null, "parameters": {"query": "a"}}', id="null beside"
        ),
        pytest.param(
            '{"type": "function", "function": {"name": "search", "arguments": {"query": "a"}}}',
            id="openai",
        ),
        pytest.param('{"id": "1", "name": "search", "arguments": {"query": "a"}}', id="with an id"),
        pytest.param(
            json.dumps({"name": "search", "arguments": json.dumps({"query": "a"})}),
            id="encoded once",
        ),
        pytest.param(
            json.dumps({"name": "search", "arguments": json.dumps(json.dumps({"query": "a"}))}),
            id="encoded twice",
        ),
        pytest.param(
            json.dumps({"name": "search", "parameters": json.dumps({"query": "a"})}),
            id="llama encoded",
        ),
        pytest.param(json.dumps(GOOD), id="whole call encoded"),
    ],
)
def test_other_forms_of_the_same_call_are_read(body):
    assert PROTOCOL.parse_calls(call(body)) == (WANTED,)


@pytest.mark.parametrize("arguments", ["{}", "null", '""', '" "', '"{}"', '"null"', '"\\"{}\\""'])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_call_without_arguments_has_no_arguments(key, arguments):
    (made,) = PROTOCOL.parse_calls(call(f'{{"name": "now", "{key}": {arguments}}}'))
    assert made == ToolCall(tool="now", arguments={})
    assert PROTOCOL.parse_calls(format_call(made)) == (made,)


def test_a_raw_line_break_in_a_text_is_one():
    (made,) = PROTOCOL.parse_calls(
        call('{"name": "python", "arguments": {"code": "x = 1\n\tprint(x)"}}')
    )
    assert made.arguments == {"code": "x = 1\n\tprint(x)"}


def test_arguments_may_be_nested_up_to_the_limit():
    value = json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))
    (made,) = PROTOCOL.parse_calls(format_call(ToolCall(tool="f", arguments={"x": value})))
    assert made == ToolCall(tool="f", arguments={"x": value})


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|im_start|>assistant\n", ""),
        ("put it into <think> tags.\nassistant\n", ""),
    ],
)
def test_the_generation_prompt_may_open_the_reasoning(prompt, opened):
    assert opened_reasoning(prompt) == opened


CUT_OFF = f"maybe {call(GOOD)} but first"


@pytest.mark.parametrize(
    ("turn", "reasoning", "content", "num_calls"),
    [
        pytest.param(f"<think>\n{CUT_OFF}", CUT_OFF, "", 0, id="cut off"),
        pytest.param(f"<think>\n<think>{CUT_OFF}", f"<think>{CUT_OFF}", "", 0, id="opened twice"),
        pytest.param(f"Well. <think>{CUT_OFF}", CUT_OFF, "Well.", 0, id="cut off after a text"),
        pytest.param(f"<think>a</think>b<think>{CUT_OFF}", f"a\n{CUT_OFF}", "b", 0, id="second"),
        pytest.param(f"{CUT_OFF}</think> So.", CUT_OFF, "So.", 0, id="closed alone"),
        pytest.param(f"a</think>b {call(GOOD)} c", "a", "b  c", 1, id="call behind"),
        pytest.param(
            f"<think>a</think>{call(GOOD)}<think>b</think>c", "a\nb", "c", 1, id="between"
        ),
        pytest.param("<think>a</think> the tag </think>", "a", "the tag </think>", 0, id="quoted"),
    ],
)
def test_calls_within_the_reasoning_are_none(turn, reasoning, content, num_calls):
    assert PROTOCOL.parse_calls(turn) == (WANTED,) * num_calls
    parts = PROTOCOL.split_turn(turn)
    assert (parts.reasoning, parts.content) == (reasoning, content)
    assert parts.calls == (WANTED,) * num_calls
    if not num_calls:
        assert split_reasoning(turn) == (reasoning, content)


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


async def test_a_toolkit_can_be_called_by_json():
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


def test_a_turn_is_text_behind_a_bounded_number_of_calls_that_cannot_be_read():
    bad = "<tool_call>{" * (MAX_UNREADABLE_CALLS + 50)
    turn = f"<think>So.</think>{call(GOOD)}{bad}{call(GOOD)}"
    first, *rest = PROTOCOL.parse_calls(turn)
    assert first == WANTED
    assert len(rest) == MAX_UNREADABLE_CALLS
    assert all(isinstance(item, InvalidToolCall) for item in rest)
    parts = PROTOCOL.split_turn(turn)
    assert (parts.reasoning, parts.content, parts.calls) == ("So.", bad + call(GOOD), (WANTED,))
    again = PROTOCOL.split_turn(parts.content)  # as clients send it back
    assert (again.content, again.calls) == (parts.content, ())

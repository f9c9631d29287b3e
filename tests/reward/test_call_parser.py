"""The forms in which calls are written, which values are equal, and junk."""

import json
from keyword import iskeyword

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mega_agentrl.reward.call_parser import (
    CallParseError,
    FunctionCall,
    normalize_value,
    parse_calls,
    read_word,
)

ONE = FunctionCall("get", (("a", ("number", 1.0)), ("b", ("text", "x"))))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get", "arguments": {"a": 1, "b": "x"}}',
        '[{"arguments": {"b": "x", "a": 1.0}, "name": "get"}]',
        '{"name": "get", "parameters": {"a": 1, "b": "x"}}',
        '{"name": "get", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}',
        '{"type": "function", "function": {"name": "get", "arguments": {"a": 1, "b": " x "}}}',
        '{"function": "get", "args": {"a": 1, "b": "x"}}',
        "get(a=1, b='x')",
        '[get(b="x", a=+1)]',
        "(get(a=1, b='x'),)",
        '<tool_call>\n{"name": "get", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        "I look it up.\n<tool_call>get(a=1, b='x')</tool_call>\nDone.",
        'Here:\n```json\n[{"name": "get", "arguments": {"a": 1, "b": "x"}}]\n```',
        "Sure: [get(a=1, b='x')] it is.",
        'The call {"name": "get", "arguments": {"a": 1, "b": "x"}} does (all) that.',
    ],
)
def test_one_call_is_read_in_every_form(text):
    assert parse_calls(text) == [ONE]


@pytest.mark.parametrize(
    "text",
    [
        "[f(), get(a=1, b='x')]",
        "f()\nget(a=1, b='x')",
        '[{"name": "f"}, {"name": "get", "arguments": {"a": 1, "b": "x"}}]',
        "<tool_call>f()</tool_call><tool_call>get(a=1, b='x')</tool_call>",
        "First [f()] and then [get(a=1, b='x')].",
    ],
)
def test_several_calls_are_read_in_their_order(text):
    assert parse_calls(text) == [FunctionCall("f", ()), ONE]


@pytest.mark.parametrize("text", ["", "  ", "[]", "No call is needed.", "see [1] and {x}", "hello"])
def test_text_without_calls_has_none(text):
    assert parse_calls(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense here</tool_call>",
        '<tool_call>{"name": "f"}',
        "```\nnot a call\n```",
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{"}',
        "[f(**x)]",
        "[f(a=open)]",
        "[f(a={**b})]",
        "[f(a=-'x')]",
        "[f(a={[1]: 2})]",
        "[f(a=1]",
        "[f(a=b'x')]",
        "[f(a=1+2)]",
        "x" * 100_001,
    ],
)
def test_calls_that_cannot_be_parsed_are_refused(text):
    with pytest.raises(CallParseError):
        parse_calls(text)


def test_arguments_by_position_and_calls_as_arguments():
    (call,) = parse_calls("a.b.f(1, g(x=2), k=[True, None, (1, 2)], m={'n': -1.5, 2: 'z'})")
    assert call.name == "a.b.f"
    got = dict(call.arguments)
    assert got["#0"] == ("number", 1.0)
    assert got["#1"] == ("call", FunctionCall("g", (("x", ("number", 2.0)),)))
    assert got["k"] == ("list", ("bool", True), ("null",), ("list", ("number", 1), ("number", 2)))
    assert got["m"] == ("map", ("2", ("text", "z")), ("n", ("number", -1.5)))
    assert parse_calls("f(a=true, b=null)") == parse_calls("f(a=True, b=None)")


def test_values_are_equal_by_number_and_text_but_not_by_truth():
    for equal in ((1, 1.0), ("1", " 1 "), ((1, 2), [1.0, 2])):
        assert len(set(map(normalize_value, equal))) == 1
    for one, other in (
        (True, 1),
        (1, "1"),
        ("1", "01"),
        ("true", "True"),
        (None, ""),
        ("", 0),
        ("x", "X"),
        ([1], 1),
        (2**60, 2**60 + 1),
    ):
        assert normalize_value(one) != normalize_value(other)
    assert normalize_value({"a": 1, "b": 2}) == normalize_value({"b": 2.0, "a": 1})
    assert read_word("1.0") == normalize_value(1) and read_word("True") == normalize_value(True)
    assert read_word("one") == normalize_value("one")
    with pytest.raises(CallParseError):
        normalize_value(b"x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z]{1,5}", fullmatch=True).filter(lambda name: not iskeyword(name))


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=4))
@example("a", {"a": "<tool_call>"})
@example("a", {"a": "<tool_call>[]</tool_call>", "b": "```json\n[]\n```"})
def test_json_and_python_say_the_same(name, arguments):
    """Every JSON value, written either way."""
    as_json = json.dumps([{"name": name, "arguments": arguments}])
    given_as = ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    assert parse_calls(f"[{name}({given_as})]") == parse_calls(as_json)


def _python(value):
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_python(item)}" for key, item in value.items()) + "}"
    return repr(value)


@given(st.text(alphabet="[]{}()\"'\\,:=-. \naf1<>/", max_size=40))
def test_junk_is_parsed_or_refused(text):
    try:
        calls = parse_calls(text)
    except CallParseError:
        return
    assert all(hash(call) == hash(call) for call in calls)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "[" * 50_000 + "]" * 50_000,
        "f(a=" + "-" * 20_000 + "1)",
        "[f" + ".a" * 20_000 + "()]",
        '{"a":' * 20_000,
        "f(" * 5_000,
        "f(a=" + "9" * 50_000 + ")",
        '{"name": "f", "arguments": {"a": ' + "9" * 50_000 + "}}",
        "f(a=\x00)",
        "<tool_call>" * 5_000,
    ],
)
def test_hostile_text_ends_soon(text):
    try:
        parse_calls(text)
    except CallParseError:
        pass

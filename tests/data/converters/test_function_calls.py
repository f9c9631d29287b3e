"""Calls in every published form become one JSON text, which the reward reads."""

import json

import pytest

from mega_agentrl.data.converters.function_calls import (
    format_calls_json,
    make_system_message,
    parameter_names,
    parse_json_call,
    parse_python_call,
)
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score

ROW = SourceRow("a.json", "row 2", {})
CALL = {"name": "get", "arguments": {"a": 1, "b": "x"}}


@pytest.mark.parametrize(
    "value",
    [
        CALL,
        {"name": "get", "arguments": '{"a": 1, "b": "x"}'},
        {"name": "get", "parameters": {"a": 1, "b": "x"}},
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get", "arguments": CALL["arguments"]},
        },
    ],
)
def test_every_json_form_of_a_call_is_the_same_call(value):
    assert parse_json_call(value, ROW, "answers") == CALL


@pytest.mark.parametrize("value", ["get", {"arguments": {}}, {"name": "get", "arguments": "{"}, 3])
def test_a_value_that_is_no_call_is_refused(value):
    with pytest.raises(InputError) as caught:
        parse_json_call(value, ROW, "answers")
    assert caught.value.name == "a.json row 2, field answers"


def test_python_calls_name_their_positional_arguments():
    names = {"get": ["a", "b"]}
    assert parse_python_call("get(1, b='x')", names, ROW, "f") == CALL
    assert parse_python_call("m.n.f(a=-1, c=[(1, 2)])", {}, ROW, "f") == {
        "name": "m.n.f",
        "arguments": {"a": -1, "c": [(1, 2)]},
    }
    with pytest.raises(InputError) as caught:
        parse_python_call("get(1, 2, 3)", names, ROW, "f")
    assert (caught.value.name, caught.value.got) == ("a.json row 2, field f", "get(1, 2, 3)")


@pytest.mark.parametrize("text", ["get", "get(a=open('x'))", "get(", "", 7, "get(a=b)"])
def test_python_that_is_no_literal_call_is_refused(text):
    with pytest.raises(InputError) as caught:
        parse_python_call(text, {}, ROW, "f")
    assert (caught.value.name, caught.value.got) == ("a.json row 2, field f", text)


def test_parameter_names_of_a_schema_and_of_a_plain_description():
    functions = [
        {"name": "f", "parameters": {"type": "dict", "properties": {"b": {}, "a": {}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"c": {"type": "str"}}}},
        {"name": "h"},
        "junk",
    ]
    assert parameter_names(functions) == {"f": ["b", "a"], "g": ["c"]}


def test_the_reward_reads_the_formatted_calls():
    text = format_calls_json([CALL, {"name": "é", "arguments": {}}], ROW, "f")
    assert (
        text == '[{"name": "get", "arguments": {"a": 1, "b": "x"}}, {"name": "é", "arguments": {}}]'
    )
    answer = f"<think>hm</think>\n{text}"
    assert score(answer, text).value == 1.0
    assert score(answer, text, match="string").value == 1.0
    assert score(answer.replace("1", "2"), text).value == 0.0


def test_no_calls_are_an_empty_list():
    text = format_calls_json([], ROW, "f")
    assert text == "[]"
    assert score("<think>no</think>[]", text).value == 1.0
    assert score("<think>no</think>[f()]", text).value == 0.0


def test_values_without_a_json_form_are_refused():
    with pytest.raises(InputError) as caught:
        format_calls_json([{"name": "f", "arguments": {"a": float("nan")}}], ROW, "f")
    assert caught.value.name == "a.json row 2, field f"


def test_the_system_message_holds_every_function_and_the_text_that_came_with_the_data():
    functions = [{"name": "f"}, {"name": "g"}]
    content = make_system_message(functions, "Be kind.")["content"]
    listed = content.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in listed.split("\n")] == functions
    assert content.endswith("Be kind.")
    assert "<tools>" not in make_system_message([])["content"]

"""Schemas are checked once, arguments at every call, and the policy can read what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.function_schema import (
    ALL_ARGUMENTS_AS_JSON,
    MAX_MESSAGE_CHARS,
    FunctionSchema,
)


def make(parameters, **changes):
    function = {"name": "f", "description": "d", "parameters": parameters} | changes
    return FunctionSchema({"type": "function", "function": function}, "here")


LOOK_UP = make(
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "top_k": {"type": "integer", "minimum": 1},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
)


def test_the_schema_is_what_a_chat_template_takes():
    assert LOOK_UP.as_dict()["type"] == "function"
    assert LOOK_UP.as_dict()["function"]["name"] == LOOK_UP.name == "f"
    assert LOOK_UP.has_parameter("query") and not LOOK_UP.has_parameter("other")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"query": "a"}, {"query": "a"}),
        ({"query": "5"}, {"query": "5"}),
        ({"query": "a", "top_k": "3"}, {"query": "a", "top_k": 3}),
        ({"query": "a", "tags": '["x"]'}, {"query": "a", "tags": ["x"]}),
        ({ALL_ARGUMENTS_AS_JSON: '{"query": "a", "top_k": 2}'}, {"query": "a", "top_k": 2}),
    ],
)
def test_arguments_are_read(given, read):
    assert LOOK_UP.validate_arguments(given) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Tool(f) got wrong arguments: 'query' is a required property"),
        ({"query": 1}, "query: 1 is not of type 'string'"),
        ({"query": "a", "top_k": "many"}, "top_k: 'many' is not of type 'integer'"),
        ({"query": "a", "top_k": 0}, "top_k: 0 is less than the minimum of 1"),
        ({"query": "a", "tags": ["x", 2]}, "tags.1: 2 is not of type 'string'"),
        ({"query": "a", "x": 1}, "'x' was unexpected"),
        (
            {ALL_ARGUMENTS_AS_JSON: "no"},
            "takes a JSON object with some of the keys query, top_k, tags",
        ),
        ({ALL_ARGUMENTS_AS_JSON: "[1]"}, "got list"),
        ({ALL_ARGUMENTS_AS_JSON: "[" * 100000}, "takes a JSON object"),
    ],
)
def test_wrong_arguments_are_told(given, message):
    with pytest.raises(ValueError, match="Tool") as caught:
        LOOK_UP.validate_arguments(given)
    assert message in str(caught.value)


def test_a_message_does_not_repeat_a_book():
    with pytest.raises(ValueError, match="Tool") as caught:
        LOOK_UP.validate_arguments({"query": ["x" * 10_000]})
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS + 100


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "expected {type: function"),
        ({"name": "f"}, "expected {type: function"),
        ({"type": "function", "function": {"name": "a b"}}, "function.name='a b'"),
        ({"type": "function", "function": {"name": "f", "argumnets": 1}}, "['argumnets']"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}},
            "not a JSON schema",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
            "expected object",
        ),
    ],
)
def test_wrong_schemas_name_their_place(schema, message):
    with pytest.raises(ValueError, match="here") as caught:
        FunctionSchema(schema, "here")
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["query", "top_k", "tags", "x", ALL_ARGUMENTS_AS_JSON]), JSON)
)
def test_whatever_the_policy_gives_is_read_or_told(given):
    try:
        read = LOOK_UP.validate_arguments(given)
    except ValueError as error:
        assert "Tool(f)" in str(error)
    else:
        assert isinstance(read["query"], str)
        assert LOOK_UP.validate_arguments(read) == read

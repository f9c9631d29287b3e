"""Schemas are checked once, arguments at every call, and the policy can read what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.call_protocol.json_text import MAX_DEPTH
from mega_agentrl.tool.function_schema import (
    ALL_ARGUMENTS_AS_JSON,
    MAX_MESSAGE_CHARS,
    FunctionSchema,
)

ALL = ALL_ARGUMENTS_AS_JSON


def nested(depth):
    """Lists in lists."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def schema_of(**function):
    return {"type": "function", "function": {"name": "f", **function}}


PARAMETERS = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "top_k": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["query"],
    "additionalProperties": False,
}
LOOK_UP = FunctionSchema(schema_of(parameters=PARAMETERS), "here")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        pytest.param({"query": "5"}, {"query": "5"}, id="text"),
        pytest.param({"query": "a", "top_k": "3"}, {"query": "a", "top_k": 3}, id="number"),
        pytest.param({"query": "a", "tags": '["x"]'}, {"query": "a", "tags": ["x"]}, id="list"),
        pytest.param({ALL: '{"query": "a", "top_k": 2}'}, {"query": "a", "top_k": 2}, id="all"),
        pytest.param({ALL: '"{\\"query\\": \\"a\\"}"'}, {"query": "a"}, id="all encoded twice"),
        pytest.param({ALL: '{"query": "a\nb"}'}, {"query": "a\nb"}, id="raw line break"),
        pytest.param({"query": "\ud800"}, {"query": "?"}, id="half a surrogate pair"),
    ],
)
def test_a_text_is_parsed_where_the_schema_takes_no_text(given, read):
    assert LOOK_UP.validate_arguments(given) == read


@pytest.mark.parametrize(
    ("given", "named"),
    [
        pytest.param({}, "'query'", id="missing"),
        pytest.param({"query": 1}, "query: 1", id="number for text"),
        pytest.param({"query": "a", "top_k": "many"}, "top_k: 'many'", id="text for number"),
        pytest.param({"query": "a", "top_k": 0}, "top_k: 0", id="below minimum"),
        pytest.param({"query": "a", "tags": ["x", 2]}, "tags.1: 2", id="inside a list"),
        pytest.param({"query": "a", "x": 1}, "'x'", id="unknown"),
        pytest.param({"query": ["x" * 10_000]}, "query: ", id="very long"),
        pytest.param({ALL: "no"}, "query, top_k, tags", id="no json"),
        pytest.param({ALL: "[1]"}, "list", id="no object"),
        pytest.param({ALL: "[" * 100000}, "query, top_k, tags", id="deep json"),
        pytest.param({ALL: '{"query": "a", "top_k": NaN}'}, "NaN", id="nan"),
        pytest.param({"query": "a", "tags": "[" * 500 + "]" * 500}, "tags", id="deep text"),
        pytest.param({"query": nested(500)}, "levels deep", id="deep"),
    ],
)
def test_the_policy_is_told_which_argument_is_wrong(given, named):
    # The message is asserted, here and below: it is what the policy reads.
    with pytest.raises(ToolInputError, match=r"Tool\(f\)") as caught:
        LOOK_UP.validate_arguments(given)
    assert named in str(caught.value)
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS + 100


@pytest.mark.parametrize(
    ("schema", "name", "got"),
    [
        pytest.param([], "here", [], id="no mapping"),
        pytest.param({"name": "f"}, "here", {"name": "f"}, id="no outer level"),
        pytest.param(schema_of(name="a b"), "here, function.name", "a b", id="name"),
        pytest.param(schema_of(argumnets=1), "here, function", ["argumnets"], id="unknown key"),
        pytest.param(
            schema_of(parameters={"type": "objekt"}),
            "here, function.parameters of f",
            {"type": "objekt"},
            id="json schema",
        ),
        pytest.param(
            schema_of(parameters={"type": "array"}),
            "here, function.parameters of f",
            {"type": "array"},
            id="no object",
        ),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(schema, name, got):
    with pytest.raises(InputError) as caught:
        FunctionSchema(schema, "here")
    assert (caught.value.name, caught.value.got) == (name, got)


QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({"properties": {"q": {"$ref": "#/$defs/Q"}}, "$defs": {"Q": QUERY}}, id="ref"),
        pytest.param(
            {
                "properties": {"q": {"anyOf": [{"$ref": "#/$defs/Q"}, {"type": "null"}]}},
                "$defs": {"Q": QUERY},
            },
            id="optional",
        ),
        pytest.param(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"q": {"allOf": [{"$ref": "#/definitions/Q"}]}},
                "definitions": {"Q": QUERY},
            },
            id="draft 7",
        ),
        pytest.param(
            {"properties": {"p": QUERY, "q": {"$ref": "#/properties/p"}}}, id="other parameter"
        ),
        pytest.param({"oneOf": [{"properties": {"q": QUERY}, "required": ["q"]}]}, id="one of"),
    ],
)
def test_a_parameter_may_be_defined_elsewhere_in_the_schema(parameters):
    made = FunctionSchema(schema_of(parameters={"type": "object", **parameters}), "here")
    for written in ({"query": "a"}, '{"query": "a"}', ' {"query": "a"}\n'):
        assert made.validate_arguments({"q": written}) == {"q": {"query": "a"}}
    for wrong in ("hello", '{"query": 3}', "[]", {"query": 3}, "3"):
        with pytest.raises(ToolInputError, match="q"):
            made.validate_arguments({"q": wrong})


def test_a_schema_may_refer_to_itself():
    tree = {"type": "object", "properties": {"children": {"items": {"$ref": "#/$defs/T"}}}}
    parameters = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/T"}},
        "$defs": {"T": tree},
    }
    made = FunctionSchema(schema_of(parameters=parameters), "here")
    value = {}
    for _ in range(MAX_DEPTH // 2 - 1):
        value = {"children": [value]}
    assert made.validate_arguments({"t": value}) == {"t": value}
    with pytest.raises(ToolInputError, match="levels deep"):
        made.validate_arguments({"t": {"children": nested(300)}})


def test_positions_of_a_list_may_be_given_as_in_draft_7():
    pair = {"type": "array", "items": [{"type": "string"}, {"type": "number"}]}
    parameters = {"type": "object", "properties": {"pair": pair}}
    made = FunctionSchema(schema_of(parameters=parameters), "here")
    assert made.validate_arguments({"pair": '["x", 1]'}) == {"pair": ["x", 1]}
    with pytest.raises(ToolInputError, match=r"pair\.1"):
        made.validate_arguments({"pair": ["x", "y"]})


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({"properties": {"a": {"$ref": "#/$defs/No"}}}, id="nowhere"),
        pytest.param({"properties": {"a": {"$ref": "https://x.example/y.json"}}}, id="fetched"),
        pytest.param({"$ref": "#"}, id="circle"),
        pytest.param({"$defs": {"A": {"$ref": "#/$defs/A"}}}, id="circle of a definition"),
    ],
)
def test_a_reference_that_no_call_can_follow_is_refused_at_the_start(parameters):
    with pytest.raises(InputError) as caught:
        FunctionSchema(schema_of(parameters=parameters), "here")
    assert (caught.value.name, caught.value.got) == ("here, function.parameters of f", parameters)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["query", "top_k", "tags", "x", ALL]), JSON))
def test_any_arguments_are_accepted_or_refused_with_a_text_for_the_policy(given):
    try:
        read = LOOK_UP.validate_arguments(given)
    except ToolInputError as error:
        assert "Tool(f)" in str(error)
    else:
        assert isinstance(read["query"], str)
        assert LOOK_UP.validate_arguments(read) == read

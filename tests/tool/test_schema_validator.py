"""Checks whose work grows with what a server or a policy sends end at their bounds."""

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.function_schema import FunctionSchema
from mega_agentrl.tool.schema_validator import MAX_PATTERN_STATES, is_readable_pattern

BACKTRACKING = "^(a+)+$"
"""Python's engine takes minutes to see that `NO_MATCH` does not match."""
NO_MATCH = "a" * 40 + "!"
STRING = {"type": "string"}
SLOW_STRING = {"type": "string", "pattern": BACKTRACKING}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def schema(**parameters):
    function = {"name": "f", "description": "", "parameters": {"type": "object", **parameters}}
    return FunctionSchema({"type": "function", "function": function}, "here")


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        pytest.param({"properties": {"x": SLOW_STRING}}, {"x": NO_MATCH}, id="pattern"),
        pytest.param(
            {"properties": {"x": {"type": "array", "items": {"anyOf": [SLOW_STRING]}}}},
            {"x": [NO_MATCH]},
            id="pattern_below",
        ),
        pytest.param({"propertyNames": SLOW_STRING}, {NO_MATCH: 1}, id="names"),
        pytest.param(
            {"patternProperties": {BACKTRACKING: STRING}, "additionalProperties": False},
            {NO_MATCH: "x"},
            id="pattern_of_names",
        ),
        pytest.param(
            {"properties": {"x": SLOW_STRING}, "$schema": DRAFT_7}, {"x": NO_MATCH}, id="draft"
        ),
        pytest.param(
            {"properties": {"const": SLOW_STRING | {"$schema": DRAFT_7}}},
            {"const": NO_MATCH},
            id="draft_of_a_part",
        ),
        pytest.param(
            {"properties": {"x": SLOW_STRING, "y": {"$ref": "#"}}, "$schema": DRAFT_7},
            {"y": {"y": {"x": NO_MATCH}}},
            id="draft_after_a_reference",
        ),
    ],
)
def test_a_pattern_takes_linear_time_wherever_it_stands(parameters, arguments):
    checked = schema(**parameters)
    with pytest.raises(ToolInputError):
        checked.validate_arguments(arguments)


def test_names_that_are_left_over_are_not_checked_against_slow_patterns():
    parts = [{"patternProperties": {BACKTRACKING: STRING}}]
    checked = schema(allOf=parts, unevaluatedProperties=False)
    assert checked.validate_arguments({NO_MATCH: "x"}) == {NO_MATCH: "x"}


def chain(length, keyword="if"):
    """Definitions each of which asks for the next one twice; with `if` for integers only."""
    definitions = {f"d{length}": {}}
    for number in range(length):
        twice = {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2}
        definition = {"if": {"type": "integer"}, "then": twice} if keyword == "if" else twice
        definitions[f"d{number}"] = definition
    return {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


def test_alternatives_that_double_at_each_level_are_refused_at_the_start():
    with pytest.raises(InputError) as caught:
        schema(**chain(30, "allOf"))
    assert caught.value.name == "here, function.parameters of f"


LIST = {"type": "array"}
MANY_NAMES = [f"name {number}" for number in range(4000)]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        pytest.param(chain(30), {"x": 1}, id="doubling"),
        pytest.param(
            {"properties": {"x": LIST | {"uniqueItems": True}}},
            {"x": [{"a": number} for number in range(3000)]},
            id="pairs",
        ),
        pytest.param(
            {"properties": {"x": LIST | {"items": {"enum": MANY_NAMES}}}},
            {"x": ["other"] * 2000},
            id="long_list_of_values",
        ),
        pytest.param(
            {"properties": {"x": LIST | {"allOf": [{"not": {}}] * 500}}},
            {"x": list(range(9000))},
            id="long_messages",
        ),
        pytest.param(
            {"properties": {"x": STRING | {"pattern": "[ab]*a[ab]{300}c"}}},
            {"x": "ab" * 50_000},
            id="pattern_with_many_states",
        ),
        pytest.param(
            {"properties": {"x": {}}, "dependentSchemas": {"x": {"$ref": "#"}}},
            {"x": 1},
            id="circle_that_arguments_choose",
        ),
        pytest.param(
            {"properties": {"x": {"type": "number", "multipleOf": 0.5}}},
            {"x": 10**400},
            id="number_without_a_double",
        ),
    ],
)
def test_arguments_that_cannot_be_checked_are_an_error_of_the_policy(parameters, arguments):
    checked = schema(**parameters)
    with pytest.raises(ToolInputError) as caught:
        checked.validate_arguments(arguments)
    assert "Tool(f) got arguments that" in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        pytest.param(
            {"properties": {"x": LIST | {"items": {"type": "number", "minimum": 0}}}},
            {"x": list(range(10_000))},
            id="numbers",
        ),
        pytest.param(
            {"properties": {"x": LIST | {"uniqueItems": True, "items": STRING}}},
            {"x": MANY_NAMES},
            id="names",
        ),
        pytest.param(
            {"properties": {"x": STRING | {"pattern": r"\S"}}}, {"x": "a " * 50_000}, id="text"
        ),
        pytest.param(
            {"properties": {"x": STRING | {"pattern": r"^[^@\s]{1,64}@[a-z0-9.-]{1,255}$"}}},
            {"x": "someone@example.org"},
            id="address",
        ),
        pytest.param(
            {
                "properties": {"a": STRING},
                "patternProperties": {"^x-": STRING},
                "additionalProperties": {"type": "integer"},
            },
            {"a": "1", "x-b": "2", "c": 3},
            id="kinds_of_names",
        ),
    ],
)
def test_usual_arguments_are_within_the_bounds(parameters, arguments):
    assert schema(**parameters).validate_arguments(arguments) == arguments


@pytest.mark.parametrize(
    "pattern",
    ["(", "(?=a)b", r"(a)\1", "(a{100}){200}", "a{99999999999999999999}", "((a{99}){99}){99}"],
)
def test_a_pattern_that_has_no_linear_time_is_refused_in_a_schema_of_the_user(pattern):
    assert not is_readable_pattern(pattern)
    for place in ({"pattern": pattern}, {"patternProperties": {pattern: STRING}}):
        with pytest.raises(InputError) as caught:
            schema(properties={"x": STRING | place})
        assert caught.value.name == "here, function.parameters of f, pattern"
        assert caught.value.got == pattern


def test_a_long_pattern_is_not_read():
    assert is_readable_pattern("a" * MAX_PATTERN_STATES)
    assert not is_readable_pattern("a" * (MAX_PATTERN_STATES + 1))

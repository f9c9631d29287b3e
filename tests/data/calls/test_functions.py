"""Schemas say what a call must look like, and types cannot be guessed from names."""

import random

import pytest

from mega_agentrl.data.calls.functions import (
    INTEGER_VALUES,
    TEXT_VALUES,
    Call,
    Function,
    ParameterType,
    make_call,
    make_function,
)

BAKO = Function("Bako", ParameterType.string)


def test_a_function_has_a_schema_and_a_call_with_its_value():
    assert BAKO.schema == {
        "type": "function",
        "function": {
            "name": "Bako",
            "parameters": {"type": "object", "properties": {"label": {"type": "string"}}},
        },
    }
    assert Call(BAKO, "warm").as_dict == {"name": "Bako", "arguments": {"label": "warm"}}


def test_a_function_takes_every_type_in_turn():
    rng = random.Random(0)
    made = {make_function("Bako", rng) for _ in range(500)}
    assert {one.name for one in made} == {"Bako"}
    assert len(made) == len(ParameterType)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        pytest.param(ParameterType.integer, INTEGER_VALUES, id="integer"),
        pytest.param(ParameterType.string, TEXT_VALUES, id="string"),
        pytest.param(ParameterType.boolean, (False, True), id="boolean"),
    ],
)
def test_values_have_the_type_of_the_parameter(kind, values):
    rng = random.Random(0)
    made = [make_call(Function("Bako", kind), rng).value for _ in range(200)]
    assert set(made) == set(values)
    assert {type(value) for value in made} == {type(values[0])}

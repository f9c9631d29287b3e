"""Functions of the splits are disjoint, and their schemas say what a call must look like."""

import random

import pytest

from mega_agentrl.data.calls.functions import (
    INTEGER_VALUES,
    MAX_PARAMETERS,
    TEXT_VALUES,
    Call,
    Function,
    ParameterType,
    make_call,
    make_functions,
)
from mega_agentrl.data.generated.entity_splits import Split, make_split_inventories

BAKO = Function("Bako", (("mode", ParameterType.string), ("key", ParameterType.boolean)))


def test_a_schema_and_a_call_by_hand():
    assert BAKO.schema == {
        "type": "function",
        "function": {
            "name": "Bako",
            "parameters": {
                "type": "object",
                "properties": {"mode": {"type": "string"}, "key": {"type": "boolean"}},
            },
        },
    }
    call = Call(BAKO, ("warm", False))
    assert call.as_dict == {"name": "Bako", "arguments": {"mode": "warm", "key": False}}


@pytest.mark.parametrize("seed", [0, 1])
def test_no_function_belongs_to_two_splits(seed):
    inventories = make_split_inventories(seed)
    functions = make_functions(inventories, seed)
    names = [function.name for split in Split for function in functions[split]]
    assert len(set(names)) == len(names) == 1024
    for split in Split:
        assert tuple(function.name for function in functions[split]) == inventories[split].entities
    assert functions == make_functions(inventories, seed)
    assert functions != make_functions(inventories, seed + 1)


def test_parameters_differ_in_name_and_type():
    functions = make_functions(make_split_inventories(0), 0)[Split.train]
    for function in functions:
        assert 1 <= len(function.parameters) <= MAX_PARAMETERS
        for column in zip(*function.parameters, strict=True):
            assert len(set(column)) == len(column)
    first = {function.parameters[0] for function in functions}
    assert len(first) == 8 * 3, "every name occurs with every type"


def test_values_have_the_types_of_the_parameters():
    kinds = {ParameterType.integer: int, ParameterType.string: str, ParameterType.boolean: bool}
    rng = random.Random(0)
    for kind in ParameterType:
        calls = [make_call(Function("Bako", (("key", kind),)), rng) for _ in range(40)]
        values = [value for call in calls for value in call.values]
        assert {type(value) for value in values} == {kinds[kind]}
        assert set(values) <= {*INTEGER_VALUES, *TEXT_VALUES, True, False}
        assert len(set(values)) > 1

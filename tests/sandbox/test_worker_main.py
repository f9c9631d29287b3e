"""The functions of a worker; its processes are tested with the pool."""

import json

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.worker_main import MAX_JSON_BYTES, load_function, to_json


@pytest.mark.parametrize(
    "function",
    ["math.sqrt", ":sqrt", "math:", "math:nothing", "math:pi"],
    ids=["no colon", "no module", "no name", "unknown", "not callable"],
)
def test_a_function_that_does_not_exist_is_refused(function):
    with pytest.raises(InputError) as caught:
        load_function(function)
    assert caught.value.got == function


def test_a_function_whose_module_cannot_be_imported_is_refused():
    with pytest.raises(ModuleNotFoundError) as caught:
        load_function("no_such_module:f")
    assert caught.value.name == "no_such_module"


class Scalar:
    def tolist(self):
        return 0.25


def test_tuples_scalars_and_odd_letters_have_a_json_form():
    assert to_json({"a": (1, Scalar()), "b": None}) == '{"a": [1, 0.25], "b": null}'
    assert json.loads(to_json("\ud800")) == "\ud800"


def test_a_value_without_a_json_form_is_refused():
    itself, deep = [], []
    itself.append(itself)
    for _ in range(100_000):
        deep = [deep]
    for value, got in (
        ({"a": {1, 2}}, "dict"),
        ({(1, 2): 1}, "dict"),
        ("x" * MAX_JSON_BYTES, f"{MAX_JSON_BYTES + 2} bytes"),
        (itself, "list"),
        (deep, "list"),
    ):
        with pytest.raises(InputError) as caught:
            to_json(value, "answer")
        assert (caught.value.name, caught.value.got) == ("answer", got)

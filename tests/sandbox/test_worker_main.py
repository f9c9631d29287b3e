"""The functions of a worker; its processes are tested with the pool."""

import json

import pytest

from mega_agentrl.sandbox.worker_main import MAX_JSON_BYTES, load_function, to_json


@pytest.mark.parametrize(
    ("function", "error", "named"),
    [
        ("math.sqrt", ValueError, "expected module:name"),
        (":sqrt", ValueError, "expected module:name"),
        ("math:", ValueError, "expected module:name"),
        ("math:nothing", ValueError, "nothing"),
        ("math:pi", ValueError, r"3\.14"),
        ("no_such_module:f", ModuleNotFoundError, "no_such_module"),
    ],
    ids=["no colon", "no module", "no name", "unknown", "not callable", "no import"],
)
def test_a_function_that_cannot_be_loaded_is_refused(function, error, named):
    with pytest.raises(error, match=named):
        load_function(function)


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
    for value, named in (
        ({"a": {1, 2}}, "type set"),
        ({(1, 2): 1}, "keys must be str"),
        ("x" * MAX_JSON_BYTES, f"at most {MAX_JSON_BYTES}"),
        (itself, "Circular reference"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=named):
            to_json(value)

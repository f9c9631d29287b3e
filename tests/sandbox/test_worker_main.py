"""The functions of a worker; its processes are tested with the pool."""

import json
import math

import pytest

from mega_agentrl.sandbox.worker_main import MAX_JSON_BYTES, load_function, to_json


def test_load_gives_the_callable():
    assert load_function("math:sqrt") is math.sqrt
    assert load_function("math:sqrt") is load_function("math:sqrt")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("math.sqrt", "expected module:name"),
        (":sqrt", "expected module:name"),
        ("math:", "expected module:name"),
        ("math:nothing", "math has no callable nothing, got None"),
        ("math:pi", "math has no callable pi, got 3.14"),
    ],
)
def test_load_refuses(function, expected):
    with pytest.raises(ValueError, match=expected):
        load_function(function)


def test_load_raises_what_the_import_raises():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_function("no_such_module:f")


class Scalar:
    def tolist(self):
        return 0.25


def test_to_json():
    assert to_json({"a": (1, Scalar()), "b": None}) == '{"a": [1, 0.25], "b": null}'
    assert json.loads(to_json("\ud800")) == "\ud800"


def test_to_json_names_what_it_cannot_write():
    with pytest.raises(ValueError, match="a value of type set has no JSON form; expected numbers"):
        to_json({"a": {1, 2}})
    with pytest.raises(ValueError, match="keys must be str"):
        to_json({(1, 2): 1})
    with pytest.raises(ValueError, match=f"expected at most {MAX_JSON_BYTES}"):
        to_json("x" * MAX_JSON_BYTES)
    itself = []
    itself.append(itself)
    with pytest.raises(ValueError, match="Circular reference"):
        to_json(itself)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        to_json(deep)

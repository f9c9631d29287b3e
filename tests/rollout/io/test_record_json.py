"""Records survive the conversion to JSON, and errors name the place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.rollout.io.record_json import from_json, parse_record_fields, to_json


class Kind(StrEnum):
    small = "small"
    large = "large"


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Kind = Kind.small


@dataclass(frozen=True)
class Outer:
    name: str | tuple[str, ...]
    inner: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    by_name: Mapping[str, float] = field(default_factory=dict)
    flag: bool = False
    anything: Any = None


inners = st.builds(Inner, st.integers(), st.sampled_from(Kind))
outers = st.builds(
    Outer,
    name=st.one_of(st.text(), st.lists(st.text()).map(tuple)),
    inner=st.one_of(st.none(), inners),
    many=st.lists(inners, max_size=3),
    by_name=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    flag=st.booleans(),
    anything=st.one_of(st.none(), st.dictionaries(st.text(), st.lists(st.integers()))),
)


@given(outers)
def test_there_and_back(record):
    assert from_json(Outer, json.loads(json.dumps(to_json(record))), "here") == record


def test_defaults_are_left_out():
    assert to_json(Outer(name="a", inner=Inner(2))) == {"name": "a", "inner": {"size": 2}}


def test_what_json_has_no_form_for_becomes_text():
    assert to_json(Outer(name="a", anything={"raw": b"x", "pair": (1, 2)}))["anything"] == {
        "raw": "b'x'",
        "pair": [1, 2],
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "here: expected the fields name of Outer"),
        ({"name": "a", "nam": 1}, "here: got the fields nam, which Outer does not have"),
        ({"name": 1}, "here.name: got 1, expected"),
        ({"name": "a", "flag": 1}, "here.flag: got 1, expected"),
        ({"name": "a", "many": [{"size": True}]}, "here.many[0].size: got True"),
        ({"name": "a", "by_name": {"b": "c"}}, "here.by_name.b: got 'c'"),
        ({"name": "a", "inner": {"size": 1, "kind": "huge"}}, "got 'huge', expected one of small,"),
        ([], "here: got [], expected"),
    ],
)
def test_errors_name_the_place_and_what_was_expected(value, said):
    with pytest.raises(ValueError) as caught:
        from_json(Outer, value, "here")
    assert said in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    record = Outer(name="a", by_name={"b": np.float32(0.5)}, anything=np.int64(3))
    assert json.dumps(to_json(record)) == '{"name": "a", "by_name": {"b": 0.5}, "anything": 3}'


def test_fields_that_the_caller_gives_are_not_asked_for():
    given = frozenset({"name"})
    assert parse_record_fields(Outer, {"flag": True}, "here", given=given) == {"flag": True}
    with pytest.raises(ValueError, match="name"):
        parse_record_fields(Outer, {"name": "a"}, "here", given=given)

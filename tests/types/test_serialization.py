"""Records are restored exactly from plain values and from JSON; errors name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.types.serialization import from_builtins, to_builtins
from tests.through_json import through_json


class Kind(StrEnum):
    small = "small"
    large = "large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    kind: Kind = Kind.small

    def __post_init__(self):
        if self.size == 13:
            raise ValueError("expected another size")


@dataclass(frozen=True)
class Outer:
    name: str | tuple[str, ...]
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_name: Mapping[str, float] = field(default_factory=dict)
    records: dict[str, Inner] = field(default_factory=dict)
    pair: tuple[float | None, int] = (None, 0)
    data: bytes = b""
    flag: bool = False
    anything: Any = None


sizes = st.integers().filter(lambda size: size != 13)
inners = st.builds(Inner, size=sizes, kind=st.sampled_from(Kind))
outers = st.builds(
    Outer,
    name=st.one_of(st.text(), st.lists(st.text()).map(tuple)),
    inner=st.none() | inners,
    many=st.lists(inners, max_size=3).map(tuple),
    by_name=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    records=st.dictionaries(st.text(), inners, max_size=3),
    pair=st.tuples(st.none() | st.floats(allow_nan=False), st.integers()),
    data=st.binary(),
    flag=st.booleans(),
    anything=st.one_of(st.none(), st.dictionaries(st.text(), st.lists(st.integers()))),
)


@given(outers)
def test_a_record_is_restored_from_its_plain_form(record):
    assert from_builtins(Outer, to_builtins(record), "here") == record
    assert through_json(record) == record


def test_numbers_keep_their_bits():
    values = {"nan": math.nan, "low": -math.inf, "zero": -0.0, "third": 1 / 3, "least": 5e-324}
    found = through_json(Outer(name="a", by_name=values)).by_name
    assert np.array(list(found.values())).tobytes() == np.array(list(values.values())).tobytes()


def test_an_integer_may_stand_for_a_float():
    found = from_builtins(Outer, to_builtins(Outer(name="a")) | {"by_name": {"b": 3}}, "here")
    assert type(found.by_name["b"]) is float


def test_values_of_other_libraries_become_plain():
    record = Outer(
        name="a",
        by_name=MappingProxyType({"b": np.float32(0.5), "c": np.float64(0.25)}),
        pair=(None, np.int64(3)),
        anything=[np.str_("d"), range(2)],
    )
    plain = to_builtins(record)
    assert json.loads(json.dumps(plain)) == to_builtins(
        Outer(name="a", by_name={"b": 0.5, "c": 0.25}, anything=["d", [0, 1]])
    ) | {"pair": [None, 3], "many": []}


def test_a_value_without_a_plain_form_is_refused_or_handed_to_the_fallback():
    record = Outer(name="a", anything={"raw": 1j})
    with pytest.raises(TypeError):
        to_builtins(record)
    assert to_builtins(record, fallback=str)["anything"] == {"raw": "1j"}


WHOLE = to_builtins(Outer(name="a", inner=Inner(size=1), many=(Inner(size=2),)))


@pytest.mark.parametrize(
    ("change", "place", "got"),
    [
        ({"name": 1}, "here", "got `int` - at `$.name`"),
        ({"flag": 1}, "here", "got `int` - at `$.flag`"),
        ({"many": [{"size": True, "kind": "small"}]}, "here", "got `bool` - at `$.many[0].size`"),
        ({"many": [{"size": 1.0, "kind": "small"}]}, "here", "got `float` - at `$.many[0].size`"),
        ({"many": [{"kind": "small"}]}, "here", "missing required field `size` - at `$.many[0]`"),
        ({"inner": {"size": 1, "kind": "huge"}}, "here", "'huge' - at `$.inner.kind`"),
        ({"inner": {"size": 13, "kind": "small"}}, "here", "expected another size - at `$.inner`"),
        (
            {"records": {"b": {"size": 1, "kind": "small", "x": 0}}},
            "here.records.b",
            "unknown fields ['x']",
        ),
        ({"by_name": {"b": "c"}}, "here", "got `str` - at `$.by_name[...]`"),
        ({"pair": [1.0]}, "here", "of length 2, got 1 - at `$.pair`"),
        ({"nam": 1}, "here", "unknown fields ['nam']"),
    ],
)
def test_errors_name_the_place_and_what_was_expected(change, place, got):
    with pytest.raises(InputError) as caught:
        from_builtins(Outer, WHOLE | change, "here")
    assert caught.value.name == place
    assert got in str(caught.value.got)


def test_a_missing_field_has_its_default_at_any_depth():
    earlier = {"name": "a", "many": [{"size": 2}], "records": {"b": {"size": 1}}}
    expected = Outer(name="a", many=(Inner(size=2),), records={"b": Inner(size=1)})
    assert from_builtins(Outer, earlier, "here") == expected


def test_a_missing_field_without_a_default_is_refused():
    with pytest.raises(InputError) as caught:
        from_builtins(Outer, {"flag": True}, "here")
    assert caught.value.name == "here" and "`name`" in caught.value.got


def test_a_list_of_records_is_restored():
    records = [Inner(size=1), Inner(size=2)]
    assert from_builtins(list[Inner], to_builtins(records), "here") == records
    with pytest.raises(InputError) as caught:
        from_builtins(list[Inner], {}, "here")
    assert caught.value.name == "here"

"""The error of a field names file, row, field and value; ids occur once."""

import pytest

from mega_agentrl.data.converters.source_row import SourceRow, unique_row_id
from mega_agentrl.errors import InputError


def row(**values):
    return SourceRow("a.jsonl", "line 3", values)


@pytest.mark.parametrize(
    ("method", "field", "got"),
    [
        ("get_text", "none", "only ['blank', 'cut', 'number']"),
        ("get_text", "blank", " "),
        ("get_text", "number", 4),
        ("get_list", "cut", "[1, "),
        ("get_list", "number", 4),
    ],
)
def test_a_bad_field_is_refused(method, field, got):
    with pytest.raises(InputError) as caught:
        getattr(row(blank=" ", number=4, cut="[1, "), method)(field)
    assert (caught.value.name, caught.value.got) == (f"a.jsonl line 3, field {field}", got)


def test_long_values_are_cut_in_messages():
    assert len(str(row(x="y" * 5000).error("x", "y" * 5000, "less"))) < 800


def test_lists_may_be_json_text_and_lose_the_nulls_of_parquet_structs():
    assert row(x='[{"a": null}]').get_list("x") == [{"a": None}]
    assert row(x=[{"a": None, "b": 1}]).get_list("x") == [{"b": 1}]


def test_the_id_of_a_row_is_its_own_or_its_place_and_occurs_once():
    seen = set()
    assert unique_row_id(row(id=7), 0, seen) == "7"
    assert unique_row_id(row(), 1, seen) == "1"
    with pytest.raises(InputError) as caught:
        unique_row_id(row(id="7"), 2, seen)
    assert (caught.value.name, caught.value.got) == ("a.jsonl line 3, field id", "7")

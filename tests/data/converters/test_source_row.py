"""The error of a field names file, row, field and value; ids occur once."""

import pytest

from mega_agentrl.data.converters.source_row import SourceRow, convert_each, unique_row_id
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


def make_number(row, place):
    return [{"place": place, "number": int(row.get_text("number"))}]


def test_malformed_rows_are_left_out_counted_and_the_first_is_named():
    result = convert_each([row(number="1"), row(text="x"), row(), row(number="4")], make_number)
    assert result.rows == [{"place": 0, "number": 1}, {"place": 3, "number": 4}]
    ((note, times),) = result.notes.items()
    assert times == 2
    assert "a.jsonl line 3, field number" in note
    assert "['text']" in note


def test_rows_that_are_all_malformed_are_another_data_set():
    with pytest.raises(InputError) as caught:
        convert_each([row(text="x"), row(text="y")], make_number)
    assert caught.value.name == "a.jsonl line 3, field number"


def test_a_row_given_twice_is_converted_once():
    seen = set()

    def make_id(row, place):
        return [{"id": unique_row_id(row, place, seen)}]

    result = convert_each([row(id="a"), row(id="b"), row(id="a")], make_id)
    assert [made["id"] for made in result.rows] == ["a", "b"]
    assert list(result.notes.values()) == [1]


def test_no_rows_give_no_rows():
    assert convert_each([], make_number).rows == []


def test_the_id_of_a_row_is_its_own_or_its_place_and_occurs_once():
    seen = set()
    assert unique_row_id(row(id=7), 0, seen) == "7"
    assert unique_row_id(row(), 1, seen) == "1"
    with pytest.raises(InputError) as caught:
        unique_row_id(row(id="7"), 2, seen)
    assert (caught.value.name, caught.value.got) == ("a.jsonl line 3, field id", "7")

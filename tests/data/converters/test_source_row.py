"""What is wrong with a row is said with file, row, field, got, expected and cause."""

import pytest

from mega_agentrl.data.converters.source_row import SourceRow, make_rl_row, unique_row_id


def row(**values):
    return SourceRow("a.jsonl", 3, values)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda r: r.get_text("none"), "field none: got only ['blank', 'cut', 'number']"),
        (lambda r: r.get_text("blank"), "field blank: got  , expected a text"),
        (lambda r: r.get_text("number"), "field number: got 4, expected a text"),
        (lambda r: r.get_list("cut"), "field cut: got [1, , expected JSON text"),
        (lambda r: r.get_list("number"), "field number: got 4, expected a list"),
    ],
)
def test_a_bad_field_is_named(read, said):
    with pytest.raises(ValueError, match="probable cause") as caught:
        read(row(blank=" ", number=4, cut="[1, "))
    assert str(caught.value).startswith("a.jsonl row 3, ")
    assert said in str(caught.value)


def test_long_values_are_cut_in_messages():
    assert len(str(row(x="y" * 5000).error("x", "y" * 5000, "less"))) < 400


def test_lists_may_be_json_text_and_lose_the_nulls_of_parquet_structs():
    assert row(x='[{"a": null}]').get_list("x") == [{"a": None}]
    assert row(x=[{"a": None, "b": 1}]).get_list("x") == [{"b": 1}]


def test_an_index_is_the_id_or_the_place_and_occurs_once():
    seen = set()
    assert unique_row_id(row(id=7), 0, seen) == "7"
    assert unique_row_id(row(), 1, seen) == "1"
    with pytest.raises(ValueError, match=r"a\.jsonl row 3, field id: got 7"):
        unique_row_id(row(id="7"), 2, seen)


def test_a_row_of_the_rl_format():
    messages = [{"role": "user", "content": "?"}]
    made = make_rl_row(
        data_source="s",
        messages=messages,
        ground_truth=("a", "b"),
        ability="x",
        extra_info={"index": 0},
    )
    assert made == {
        "data_source": "s",
        "prompt": messages,
        "ability": "x",
        "reward_model": {"style": "rule", "ground_truth": ["a", "b"]},
        "extra_info": {"index": 0},
    }

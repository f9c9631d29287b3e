"""Possible answers written out: every choice, no other, and not too many."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.converters.bfcl_answers import MAX_ANSWERS, possible_answers
from mega_agentrl.data.converters.source_row import SourceRow

ROW = SourceRow("b.json", 1, {})


def arguments(truth):
    answers = possible_answers(truth, {}, ROW)
    return [[call["arguments"] for call in json.loads(answer)] for answer in answers]


def test_every_choice_of_every_argument():
    truth = [{"area": {"base": [10], "unit": ["cm", "units", ""]}}]
    assert arguments(truth) == [
        [{"base": 10, "unit": "cm"}],
        [{"base": 10, "unit": "units"}],
        [{"base": 10}],
    ]


def test_objects_list_the_values_of_their_members_also_inside_lists():
    truth = [{"f": {"o": [{"city": ["Rome", "Roma"], "zip": [""]}], "l": [[{"k": [1]}, 2]]}}]
    assert arguments(truth) == [
        [{"o": {"city": "Rome"}, "l": [{"k": 1}, 2]}],
        [{"o": {"city": "Roma"}, "l": [{"k": 1}, 2]}],
    ]


def test_empty_lists_and_functions_without_arguments():
    assert arguments([{"f": {"a": [[]]}}]) == [[{"a": []}]]
    assert possible_answers([{"f": {}}], {}, ROW) == ['[{"name": "f", "arguments": {}}]']
    assert possible_answers([], {}, ROW) == ["[]"]


def test_python_calls():
    truth = ["calc(20, k=5)", "done()"]
    assert possible_answers(truth, {"calc": ["n", "k"]}, ROW) == [
        '[{"name": "calc", "arguments": {"n": 20, "k": 5}}, {"name": "done", "arguments": {}}]'
    ]


@pytest.mark.parametrize(
    "truth", [[{"f": {"a": 1}}], [{"f": {"a": []}}], [{"f": [], "g": []}], [["f()"]], [{"f": 1}]]
)
def test_another_form_is_an_error_with_its_place(truth):
    with pytest.raises(ValueError, match=r"b\.json row 1, field ground_truth"):
        possible_answers(truth, {}, ROW)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_number_of_answers_is_the_product_of_the_choices(sizes):
    truth = [{"f": {f"a{i}": list(range(size)) for i, size in enumerate(sizes)}}]
    product = 1
    for size in sizes:
        product *= size
    answers = possible_answers(truth, {}, ROW)
    if product > MAX_ANSWERS:
        assert answers is None
    else:
        assert len(set(answers)) == len(answers) == product


def test_far_too_many_are_not_even_counted():
    wide = {f"a{i}": list(range(10)) for i in range(40)}
    assert possible_answers([{"f": wide}], {}, ROW) is None
    assert possible_answers([{"f": {"o": [wide]}}], {}, ROW) is None
    assert possible_answers([{"f": {"a": [1, 2]}}] * 30, {}, ROW) is None

"""Ground truths of any JSON type, as parts that compare texts and people read them."""

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.types.ground_truth import accepted_answers, ground_truth_text


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        pytest.param("34", ("34",), id="text"),
        pytest.param(34, ("34",), id="integer"),
        pytest.param(2.5, ("2.5",), id="fraction"),
        pytest.param(34.0, ("34",), id="integer_in_a_column_of_floats"),
        pytest.param(1e-7, ("0.0000001",), id="small_number_without_exponent"),
        pytest.param(10**30, ("1" + "0" * 30,), id="large_integer_is_exact"),
        pytest.param(True, ("True",), id="boolean"),
        pytest.param(["Paris", "City of Paris"], ("Paris", "City of Paris"), id="list"),
        pytest.param(["1", 2], ("1", "2"), id="mixed_list"),
        pytest.param({"target": ["Paris", 7]}, ("Paris", "7"), id="search_r1"),
        pytest.param({"target": "Paris", "aliases": None}, ("Paris",), id="target_is_one_text"),
        pytest.param(["", "Paris"], ("Paris",), id="a_blank_text_is_no_answer"),
    ],
)
def test_accepted_answers_are_texts(truth, answers):
    assert accepted_answers(truth) == answers


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(None, id="null"),
        pytest.param("", id="empty_text"),
        pytest.param(" \n", id="blank_text"),
        pytest.param([], id="empty_list"),
        pytest.param([""], id="list_of_blanks"),
        pytest.param([["Paris"]], id="nested_list"),
        pytest.param(["Paris", None], id="null_in_a_list"),
        pytest.param({"tests": ["assert f(1) == 2"]}, id="object_for_a_users_function"),
        pytest.param({"target": None}, id="null_target"),
        pytest.param({"target": []}, id="empty_target"),
        pytest.param(float("nan"), id="not_a_number"),
        pytest.param(10**5000, id="integer_that_python_does_not_print"),
    ],
)
def test_a_truth_without_a_text_to_compare_with_is_refused(truth):
    with pytest.raises(InputError) as caught:
        accepted_answers(truth)
    assert (caught.value.name, caught.value.got) == ("ground_truth", truth)
    assert caught.value.cause


def test_where_no_call_may_be_expected_a_blank_text_counts():
    assert accepted_answers("", allow_blank=True) == ("",)
    assert accepted_answers(["", "f()"], allow_blank=True) == ("", "f()")


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        pytest.param("34", "34", id="text"),
        pytest.param({"target": ["Paris", 7]}, "Paris | 7", id="several"),
        pytest.param({"tests": ["é"]}, '{"tests": ["é"]}', id="object"),
        pytest.param(None, "", id="none"),
    ],
)
def test_people_read_every_truth_as_text(truth, text):
    assert ground_truth_text(truth) == text

"""Accepted values are checked argument by argument, and calls one to one."""

import json

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score


def accepted(name="f", optional=(), **options):
    return {"name": name, "accepted": options, "optional": list(optional)}


def is_right(answer, *expected, **options):
    return score(f"</think>{answer}", json.dumps(expected), **options).correct


AREA = accepted("area", ["unit"], base=[10, 12], unit=["cm", ""])


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        pytest.param("[area(base=10, unit='cm')]", True, id="all"),
        pytest.param("[area(base=12)]", True, id="optional_left_out"),
        pytest.param("[area(base=12, unit='')]", True, id="empty_text_is_listed"),
        pytest.param("[area(base=11)]", False, id="value_not_listed"),
        pytest.param("[area(unit='cm')]", False, id="required_left_out"),
        pytest.param("[area(base=10, height=2)]", False, id="unknown_argument"),
        pytest.param("[volume(base=10)]", False, id="another_function"),
        pytest.param("[area(base=10), area(base=10)]", False, id="a_call_too_many"),
        pytest.param("[]", False, id="no_call"),
    ],
)
def test_an_answer_is_right_if_every_argument_has_a_listed_value(answer, right):
    assert is_right(answer, AREA) is right


def test_a_required_argument_that_lists_the_empty_text_must_be_given():
    expected = accepted(airport=["JFK", ""])
    assert is_right("[f(airport='')]", expected)
    assert not is_right("[f()]", expected)


def test_an_object_has_a_listed_value_for_each_member_also_inside_a_list():
    member = {"accepted": {"city": ["Rome", "Roma"], "zip": [1]}, "optional": ["zip"]}
    expected = accepted(o=[member], l=[[member, 2], []])
    for right in (
        'o={"city": "Roma"}, l=[]',
        'o={"city": "Rome", "zip": 1}, l=[{"city": "Rome"}, 2]',
    ):
        assert is_right(f"[f({right})]", expected)
    for wrong in (
        'o={"zip": 1}, l=[]',
        'o={"city": "Roma"}, l=[{"city": "Bern"}, 2]',
        "o=[], l=[]",
    ):
        assert not is_right(f"[f({wrong})]", expected)


def test_calls_are_matched_one_to_one_whatever_each_could_match():
    """The first expected call accepts both answers, the second only one of them."""
    broad, narrow = accepted(a=[1, 2]), accepted(a=[1, 3])
    assert is_right("[f(a=1), f(a=2)]", broad, narrow)
    assert is_right("[f(a=2), f(a=1)]", broad, narrow)
    assert not is_right("[f(a=2), f(a=2)]", broad, narrow)
    assert not is_right("[f(a=1), f(a=2)]", broad, narrow, ordered=True)
    assert is_right("[f(a=2), f(a=1)]", broad, narrow, ordered=True)


def test_literal_calls_stand_beside_accepted_ones():
    literal = {"name": "g", "arguments": {"x": "A, b"}}
    assert is_right("[g(x='A, b'), f(a=1)]", accepted(a=[1, 2]), literal)
    assert not is_right("[g(x='ab'), f(a=1)]", accepted(a=[1, 2]), literal)
    assert is_right("[g(x='ab'), f(a=1)]", accepted(a=[1, 2]), literal, match="bfcl")


def test_texts_are_compared_as_bfcl_does_also_inside_of_accepted_values():
    expected = accepted(place=["New York, NY"], l=[["St. Ives"]])
    assert is_right("[f(place='new york ny', l=['st ives'])]", expected, match="bfcl")
    assert not is_right("[f(place='new york ny', l=['st ives'])]", expected)


def test_any_number_of_accepted_answers_is_checked_at_once():
    wide = [accepted(**{f"a{i}": list(range(100)) for i in range(20)})] * 4
    arguments = ", ".join(f"a{i}={i}" for i in range(20))
    assert is_right("[" + ", ".join([f"f({arguments})"] * 4) + "]", *wide)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"name": "f", "accepted": {"a": []}, "optional": []}, id="no_value"),
        pytest.param({"name": "f", "accepted": {"a": 1}, "optional": []}, id="no_list"),
        pytest.param({"name": "f", "accepted": {"a": [1]}, "optional": ["b"]}, id="optional"),
        pytest.param({"accepted": {"a": [1]}, "optional": []}, id="no_name"),
    ],
)
def test_a_truth_of_another_form_is_refused(bad):
    with pytest.raises(InputError) as caught:
        is_right("[]", bad)
    assert caught.value.name == "ground_truth"

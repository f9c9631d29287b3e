"""EGPO's reward: the published rows, and calls compared as calls."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "egpo.json").read_text(encoding="utf-8")
)
THINK = "<think>x</think>"


@pytest.mark.parametrize(
    "case", GOLDEN["binary_reward_string_match"], ids=lambda case: case["name"]
)
def test_scores_are_those_of_the_published_code(case):
    got = score(case["solution"], case["ground_truth"], match="string")
    assert got.value == case["score"]
    assert got.correct is (case["score"] == 1.0)


@pytest.mark.parametrize(
    ("solution", "published"),
    [
        ("[get(a=1)]<think></think>[get(a=1)]", 1.0),
        ('<think>{ "Name" : 1</think>[get(a=1)]', 1.0),
        ("<think></think>[get (a=1)]", 0.0),
        ("<think></think>", 0.0),
        ("", 0.0),
    ],
)
def test_string_match_follows_the_published_rule(solution, published):
    assert score(solution, "[get(a=1)]", match="string").value == published


@pytest.mark.parametrize(
    ("solution", "truth", "want"),
    [
        ("[get(a=1)]", "[get(a=1)]", 1),
        ('{"name": "get", "arguments": {"a": 1}}', "[get(a=1)]", 1),
        ('{"name": "f", "args": {"b": 2, "a": 1}}', '{"name": "f", "args": {"a": 1, "b": 2}}', 1),
        ("[f(b='2', a=1.0)]", "[f(a=1, b=2)]", 1),
        ("[get(a=f(1))]", "[get(a=f(1))]", 1),
        ("Sure: [get(a=1)]", "[get(a=1)]", 1),
        ("[get(a=1)] or rather [get(a=2)]", "[get(a=1)]", 0),
        ("[get(a=2)]", "[get(a=1)]", 0),
        ("[put(a=1)]", "[get(a=1)]", 0),
        ("[get(a=1, b=2)]", "[get(a=1)]", 0),
        ("[get()]", "[get(a=1)]", 0),
        ("[get(a=true)]", "[get(a=1)]", 0),
        ("[get(a=1), get(a=1)]", "[get(a=1)]", 0),
        ("nothing", "[get(a=1)]", 0),
        ("nothing", "[]", 1),
        ("nothing", "", 1),
        ("[get(a=1)]", "", 0),
        ("<tool_call>broken</tool_call>", "[]", 0),
    ],
)  # fmt: skip
def test_calls_are_compared(solution, truth, want):
    got = score(THINK + solution, truth)
    assert got.value == got.f1 == want and got.correct is bool(want), got.reason


def test_format_is_closed_reasoning():
    assert score("reasoning the template opened</think>[get(a=1)]", "[get(a=1)]").correct
    assert not score("[get(a=1)]", "[get(a=1)]").correct
    assert not score("<think>[get(a=1)]", "[get(a=1)]").correct
    assert not score("[get(a=1)]<think>x</think>", "[get(a=1)]").correct
    assert not score("<think>[get(a=1)]</think>", "[get(a=1)]").correct


def test_order_matters_where_it_is_asked_for_and_any_truth_will_do():
    swapped = THINK + "[g(), f()]"
    assert score(swapped, "[f(), g()]").correct
    assert not score(swapped, "[f(), g()]", ordered=True).correct
    assert score(swapped, "[g(), f()]", ordered=True).correct
    assert score(swapped, ["[h()]", "[f(), g()]"]).correct
    assert score(THINK + "b", ["a", "b"], match="string").value == 0  # nothing like a call


@pytest.mark.parametrize(
    ("solution", "truth", "ast", "bfcl"),
    [
        ("[f(city='new-york, NY')]", "[f(city='New York NY')]", 0, 1),
        ("[f(date='2024/01/05')]", "[f(date='2024-01-05')]", 0, 1),
        ("[f(who=['bob', 'ANN'])]", "[f(who=['Bob', 'Ann'])]", 0, 1),
        ("[f(o={'k': [{'a': 'x.y'}]})]", "[f(o={'k': [{'a': 'XY'}]})]", 0, 1),
        ("""[f(q="it's")]""", """[f(q='it\\"s')]""", 0, 1),
        ("[F(a='x')]", "[f(a='x')]", 0, 0),
        ("[f(A='x')]", "[f(a='x')]", 0, 0),
        ("[f(o={'K': 1})]", "[f(o={'k': 1})]", 0, 0),
        ("[f(city='New Jersey')]", "[f(city='New York')]", 0, 0),
        ("[f(a=1.0)]", "[f(a=1)]", 1, 1),
        ("[f(a=1.5)]", "[f(a=15)]", 0, 0),
    ],
)
def test_bfcl_ignores_case_spaces_and_punctuation_of_texts_only(solution, truth, ast, bfcl):
    assert score(THINK + solution, truth).value == ast
    assert score(THINK + solution, truth, match="bfcl").value == bfcl


@pytest.mark.parametrize("match", ["ast", "bfcl"])
@pytest.mark.parametrize(
    ("solution", "truth", "want"),
    [
        ("[f(zip='2134')]", "[f(zip='02134')]", 0),
        ("[f(v='3.10')]", "[f(v='3.1')]", 0),
        ("[f(v='1e3')]", "[f(v='1000')]", 0),
        ("[f(o={'k': ['007']})]", "[f(o={'k': ['7']})]", 0),
        ("[f(a=g(v='3.10'))]", "[f(a=g(v='3.1'))]", 0),
        ("[f(v='3.10')]", "[f(v='3.10')]", 1),
        ("[f(v=1)]", "[f(v=True)]", 0),
    ],
)
def test_two_texts_compare_as_texts(match, solution, truth, want):
    assert score(THINK + solution, truth, match=match).value == want


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("[f(v='3.10')]", "[f(v=3.1)]"),
        ("[f(v=7)]", "[f(v='007')]"),
        ("[f(o={'k': [7]})]", "[f(o={'k': ['7']})]"),
        ("[f(v='true')]", "[f(v=True)]"),
    ],
)
def test_a_text_is_a_number_where_one_is_expected_but_not_for_bfcl(solution, truth):
    assert score(THINK + solution, truth).value == 1
    assert score(THINK + solution, truth, match="bfcl").value == 0


@given(st.permutations(["f(a=1)", "g(b='x', c=[1, 2])", "f(a=2)", "h()"]))
def test_any_order_is_the_same_set(calls):
    truth = "[f(a=1), f(a=2), g(c=[1, 2], b='x'), h()]"
    assert score(f"{THINK}[{', '.join(calls)}]", truth).correct


@given(st.text(max_size=30))
def test_any_text_has_a_reward(text):
    for match in ("ast", "string"):
        assert score(text, "[get(a=1)]", match=match).value in (0.0, 1.0)
    assert score(THINK + text, "[get(a=1)]").value in (0.0, 1.0)


def test_an_invalid_ground_truth_or_match_is_refused():
    with pytest.raises(InputError) as caught:
        score(THINK, "forty-two")
    assert (caught.value.name, caught.value.got) == ("ground_truth", "forty-two")
    with pytest.raises(InputError) as caught:
        score(THINK, "[]", match="json")
    assert (caught.value.name, caught.value.got) == ("match", "json")

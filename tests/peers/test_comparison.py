"""`tests.peers.comparison`: differences need a reason, and reasons a difference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.peers.comparison import Comparison, Reason, Refusal, compare, is_equal


def outcome(theirs, *reasons, inputs=range(4)):
    return compare(
        Comparison(
            function="f", inputs=inputs, ours=lambda x: x * 1.0, theirs=theirs, reasons=reasons
        )
    )


def above(limit):
    return Reason(f"above {limit}", lambda x: x > limit)


def test_equal_results_need_no_reason():
    assert outcome(lambda x: x).failures == []


def test_a_difference_without_a_reason_fails_and_is_shown():
    result = outcome(lambda x: x + (x > 1))
    assert (result.num_inputs, result.unexplained) == (4, 2)
    assert result.failures[0] == "2 differences without a reason"
    assert "input 2; ours 2.0; theirs 3" in result.failures


def test_the_first_reason_that_applies_explains_a_difference():
    result = outcome(lambda x: x + (x > 1), above(2), above(1))
    assert result.explained == {"above 2": 1, "above 1": 1} and result.failures == []


def test_a_reason_that_explains_nothing_fails():
    assert outcome(lambda x: x, above(2)).failures == ["no input differs by the reason: above 2"]


def test_an_exception_agrees_with_an_exception_only():
    def refuse(x):
        raise ValueError(x)

    assert outcome(refuse).unexplained == 4
    both = compare(Comparison(function="f", inputs=[1], ours=refuse, theirs=refuse))
    assert both.unexplained == 0 and both.failures == ["no input was accepted"]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (1.0, 1 + 1e-6, True),
        (1.0, 1.1, False),
        (math.nan, math.nan, True),
        (True, False, False),
        ("a", "a", True),
        ([1.0, {"a": 2}], (1.0, {"a": 2}), True),
        ({"a": 1}, {"b": 1}, False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), [1.0, 1.0], False),
        (Refusal("one"), Refusal("other"), True),
        (Refusal("one"), 1.0, False),
    ],
)
def test_equal_within_the_tolerance(left, right, expected):
    assert is_equal(left, right, 1e-5) is expected

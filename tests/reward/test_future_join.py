"""Futures that come together: results, the first error, cancelling, any order of arrival."""

from concurrent.futures import CancelledError, Future
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.future_join import gather_futures


@given(st.permutations(range(4)))
def test_made_of_all_results_whatever_comes_first(order):
    parts = {str(index): Future() for index in range(4)}
    whole = gather_futures(parts, lambda came: [came[name] for name in parts])
    for place, index in enumerate(order):
        assert not whole.done(), place
        parts[str(index)].set_result(index * 10)
    assert whole.result(0) == [0, 10, 20, 30]


def test_results_that_are_there_already():
    done = Future()
    done.set_result(3)
    assert gather_futures({"a": done}, lambda came: came["a"] + 1).result(0) == 4


@pytest.mark.parametrize("order", permutations(range(3)))
def test_the_first_error_is_the_result_and_what_comes_later_changes_nothing(order):
    parts = {str(index): Future() for index in range(3)}
    whole = gather_futures(parts, dict)
    settle = [
        lambda: parts["0"].set_exception(KeyError("zero")),
        lambda: parts["1"].set_result(1),
        lambda: parts["2"].set_exception(OSError("two")),
    ]
    for index in order:
        settle[index]()
    expected = KeyError if order.index(0) < order.index(2) else OSError
    assert isinstance(whole.exception(0), expected)


def test_cancelling_reaches_the_parts():
    parts = {"a": Future(), "b": Future()}
    whole = gather_futures(parts, dict)
    assert whole.cancel()
    assert parts["a"].cancelled() and parts["b"].cancelled()


def test_a_part_that_is_cancelled_and_a_bug_are_errors():
    parts = {"a": Future(), "b": Future()}
    whole = gather_futures(parts, dict)
    parts["a"].cancel()
    assert isinstance(whole.exception(0), CancelledError)
    done = Future()
    done.set_result(0)
    assert isinstance(
        gather_futures({"a": done}, lambda came: 1 / 0).exception(0), ZeroDivisionError
    )

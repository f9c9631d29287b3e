"""pass@k and mean@k: by hand, and against drawing k answers over and over."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.train.pass_at_k import pass_at_k, pass_at_k_metrics


def test_by_hand():
    # 4 answers, 1 right: of the 6 pairs 3 hold it.
    assert pass_at_k(1, 4, 1) == 0.25
    assert pass_at_k(1, 4, 2) == 0.5
    assert pass_at_k(1, 4, 4) == 1.0
    assert pass_at_k(0, 4, 4) == 0.0
    assert pass_at_k(3, 4, 2) == 1.0


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_it_is_the_mean_over_all_ways_to_draw_k(right, k):
    k = min(k, len(right))
    drawn = [float(any(some)) for some in combinations(right, k)]
    assert pass_at_k(sum(right), len(right), k) == pytest.approx(fmean(drawn))


def test_metrics_are_means_over_questions_at_powers_of_two():
    right = [[True, False, False, False, False], [True] * 5]
    found = pass_at_k_metrics(right, 5)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "mean@5"]
    # 1 of 5: 4 of the 10 pairs, 4 of the 5 fours.
    assert found["pass@2"] == pytest.approx((0.4 + 1) / 2)
    assert found["pass@4"] == pytest.approx((0.8 + 1) / 2)
    assert found["mean@5"] == found["pass@1"] == pytest.approx(0.6)


def test_questions_with_too_few_answers_say_nothing():
    found = pass_at_k_metrics([[True], [False, False]], 2)
    assert found == {"pass@1": 0.5, "pass@2": 0.0, "mean@2": 0.5}
    assert pass_at_k_metrics([[True]], 1) == {}
    assert pass_at_k_metrics([[]], 4) == {}

"""Weights by accuracy: by hand, and what holds for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.curriculum import MIN_LEARNABILITY, learnability_weights


def test_by_hand():
    # f: 1 (not seen), 1 (1/2), .75 (1/4 or 3/4), .1 (never, always); the sum 3.6 becomes 6.
    accuracies = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.0, 5: 1.0}
    weights = learnability_weights([1.0] * 6, accuracies)
    expected = [1, 1, 0.75, 0.75, 0.1, 0.1]
    assert weights == pytest.approx([value * 6 / 3.7 for value in expected])


def test_files_keep_their_say_and_nothing_seen_is_nothing_changed():
    assert learnability_weights([2.0, 0.5], {}) == [2.0, 0.5]
    assert learnability_weights([3.0, 1.0], {0: 0.0, 1: 0.0}) == pytest.approx([3.0, 1.0])


@given(
    st.lists(st.floats(0.1, 5), min_size=3, max_size=8),
    st.dictionaries(st.integers(0, 2), st.floats(0, 1)),
)
def test_an_epoch_stays_as_long_and_nothing_starves(base, accuracies):
    weights = learnability_weights(base, accuracies)
    assert sum(weights) == pytest.approx(sum(base))
    shares = [weight / given for weight, given in zip(weights, base, strict=True)]
    assert min(shares) >= MIN_LEARNABILITY * max(shares) * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(0, 1))
def test_nearer_to_one_half_is_not_less(one, other):
    weights = learnability_weights([1.0, 1.0], {0: one, 1: other})
    if abs(one - 0.5) <= abs(other - 0.5):
        assert weights[0] >= weights[1] * (1 - 1e-9)

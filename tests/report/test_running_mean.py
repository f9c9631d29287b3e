"""The running mean, by hand and by what it lies between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.running_mean import running_mean


def test_running_mean_by_hand():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0], 10) == [1.0, 2.0]
    assert running_mean([], 3) == []


@given(st.lists(st.floats(-10, 10), max_size=40), st.integers(1, 12))
def test_running_mean_stays_between_the_values_it_averages(values, window):
    for index, mean in enumerate(running_mean(values, window)):
        seen = values[max(0, index - window + 1) : index + 1]
        assert min(seen) - 1e-9 <= mean <= max(seen) + 1e-9


def test_running_mean_needs_a_window():
    with pytest.raises(ValueError, match="window=0"):
        running_mean([1.0], 0)

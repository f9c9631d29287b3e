"""The tests that decide whether the error has been corrected."""

from median import median


def test_odd() -> None:
    """The number in the middle."""
    assert median([3, 1, 2]) == 2


def test_even() -> None:
    """The mean of the two in the middle."""
    assert median([4, 1, 3, 2]) == 2.5

"""Range check of a single setting."""

from __future__ import annotations


def check_range(ok: bool, key: str, got: object, expected: str) -> None:
    """Raise a `ValueError` with key, value and expected range unless `ok`."""
    if not ok:
        raise ValueError(f"{key}={got}: expected {expected}")

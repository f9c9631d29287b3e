"""The range check of single settings."""

from __future__ import annotations


def require(ok: bool, key: str, got: object, expected: str) -> None:
    """Raise `ValueError` naming key, value and what was expected, unless `ok`."""
    if not ok:
        raise ValueError(f"{key}={got}: expected {expected}")

"""Running mean of a noisy curve."""

from __future__ import annotations

from collections.abc import Sequence


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each position, of fewer at the start."""
    if window < 1:
        raise ValueError(f"running_mean: window={window}: expected at least 1")
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means

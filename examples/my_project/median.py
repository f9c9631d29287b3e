"""The median of numbers, with an error that an agent is to find: see docs/tools.md."""


def median(numbers: list[float]) -> float:
    """Return the number in the middle, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] + ordered[middle] / 2

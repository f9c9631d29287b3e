"""Which trees a page holds when not all of them fit: evenly over the files, evenly within one.

Every file of trees (a step) gets the same share of the bytes; what a small one does not need goes
to the others. When the shares would be too small for a few trees each, files are left out
evenly; the first and the last one stay. Sizes are what all trees of a file would take on the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_TREES = 4
"""Trees that a file should be able to show; below that, fewer files are shown."""


@dataclass(slots=True, kw_only=True, frozen=True)
class FileSize:
    """Bytes that all trees of a file take, and their number."""

    num_bytes: int
    num_trees: int


def choose_trees(files: Sequence[FileSize], budget_bytes: int) -> list[list[int]]:
    """Indices of the trees to take from each file; a file that is left out has none."""
    taken: list[list[int]] = [[] for _ in files]
    chosen = _chosen_files(files, budget_bytes)
    left, todo = budget_bytes, sorted(chosen, key=lambda index: files[index].num_bytes)
    for position, index in enumerate(todo):
        size = files[index]
        share = left // (len(todo) - position)
        number = size.num_trees
        if size.num_bytes > share:
            number = max(1, share * size.num_trees // size.num_bytes)
        taken[index] = spread(size.num_trees, number)
        left = max(0, left - size.num_bytes * number // max(1, size.num_trees))
    return taken


def spread(number: int, most: int) -> list[int]:
    """`most` of the indices 0 ... number-1, evenly, both ends among them where there is room."""
    if most >= number:
        return list(range(number))
    if most <= 1:
        return [0][:most]
    return [round(index * (number - 1) / (most - 1)) for index in range(most)]


def _chosen_files(files: Sequence[FileSize], budget_bytes: int) -> list[int]:
    """As many files as can show `FEWEST_TREES` each on average, evenly."""
    filled = [index for index, size in enumerate(files) if size.num_trees > 0]
    if not filled:
        return []
    needed = [
        files[index].num_bytes * min(FEWEST_TREES, files[index].num_trees) / files[index].num_trees
        for index in filled
    ]
    fitting = int(budget_bytes / max(1.0, sum(needed) / len(needed)))
    return [filled[position] for position in spread(len(filled), max(2, fitting))]

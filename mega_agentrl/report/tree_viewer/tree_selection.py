"""Select the trees of a page if not all fit: evenly over the files and within each file.

Every file (a step) gets an equal part of the byte budget; files pass on what they do not need. If
the parts are too small for a few trees each, files are skipped evenly, except for the first and the
last. Sizes are bytes of all trees of a file on the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TREES_PER_FILE = 4
"""Number of trees that each file should show; otherwise fewer files are shown."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeFileSize:
    """Number of trees of a file and their bytes on the page."""

    num_bytes: int
    num_trees: int


def select_trees(files: Sequence[TreeFileSize], budget_bytes: int) -> list[list[int]]:
    """Return the indices of the selected trees of each file; empty for skipped files."""
    selected: list[list[int]] = [[] for _ in files]
    chosen = _select_files(files, budget_bytes)
    left, todo = budget_bytes, sorted(chosen, key=lambda index: files[index].num_bytes)
    for position, index in enumerate(todo):
        size = files[index]
        share = left // (len(todo) - position)
        number = size.num_trees
        if size.num_bytes > share:
            number = max(1, share * size.num_trees // size.num_bytes)
        selected[index] = evenly_spaced_indices(size.num_trees, number)
        left = max(0, left - size.num_bytes * number // max(1, size.num_trees))
    return selected


def evenly_spaced_indices(number: int, most: int) -> list[int]:
    """Return `most` evenly spaced indices of 0 ... number-1, with both ends if possible."""
    if most >= number:
        return list(range(number))
    if most <= 1:
        return [0][:most]
    return [round(index * (number - 1) / (most - 1)) for index in range(most)]


def _select_files(files: Sequence[TreeFileSize], budget_bytes: int) -> list[int]:
    """Return as many files as can show `MIN_TREES_PER_FILE` on average, evenly spaced."""
    filled = [index for index, size in enumerate(files) if size.num_trees > 0]
    if not filled:
        return []
    needed = [
        files[index].num_bytes
        * min(MIN_TREES_PER_FILE, files[index].num_trees)
        / files[index].num_trees
        for index in filled
    ]
    fitting = int(budget_bytes / max(1.0, sum(needed) / len(needed)))
    return [filled[position] for position in evenly_spaced_indices(len(filled), max(2, fitting))]

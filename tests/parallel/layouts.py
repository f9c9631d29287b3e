"""The grid of layouts, and a small subset that contains every pair of values.

A cell is a model and a way to cut it: one value for each of `AXES`. Not every combination is a
layout (`is_valid`); `GRID` holds those that are. `pairwise` picks cells such that every two
values of two axes that stand together in some cell of the grid stand together in a picked one.
`QUICK` is the part of these cells that is enough for every two values of two cuts.
"""

from __future__ import annotations

from itertools import combinations, product
from math import prod
from typing import Any

from mega_agentrl.config.enums import Recompute

MAX_RANKS = 4
MODELS = ("llama", "qwen2", "qwen3", "qwen3-tied", "qwen3_moe")

AXES: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "virtual_pipeline": (1, 2),
    "data": (1, 2),
    "context": (1, 2),
    "sequence_parallel": (False, True),
    "expert": (1, 2),
    "expert_tensor": (1, 2),
    "distributed_optimizer": (False, True),
    "recompute": tuple(Recompute),
}
CUTS = tuple(AXES)[1:9]
"""The axes that say which rank holds what and computes what; the model and the rest are options."""
Cell = dict[str, Any]


def num_ranks(cell: Cell) -> int:
    """Return the number of processes of a layout."""
    return prod(cell[axis] for axis in ("tensor", "pipeline", "data", "context"))


def is_valid(cell: Cell) -> bool:
    """Return whether the trainer accepts the layout; dense models have expert_tensor=1."""
    moe = cell["model"] == "qwen3_moe"
    stage_ranks = cell["tensor"] * cell["data"] * cell["context"]
    return (
        num_ranks(cell) <= MAX_RANKS
        and (cell["virtual_pipeline"] == 1 or cell["pipeline"] > 1)
        and (not cell["sequence_parallel"] or cell["tensor"] > 1)
        and (not moe or cell["sequence_parallel"] or cell["tensor"] == 1)
        and (moe or cell["expert"] == cell["expert_tensor"] == 1)
        and stage_ranks % (cell["expert"] * cell["expert_tensor"]) == 0
    )


def name_of(cell: Cell) -> str:
    """Return a short unique name, such as `qwen3-TP2-PP2-V2-plain`."""
    short = {
        "tensor": "TP",
        "pipeline": "PP",
        "virtual_pipeline": "V",
        "data": "DP",
        "context": "CP",
    }
    short |= {"expert": "EP", "expert_tensor": "ETP"}
    parts = [f"{short[axis]}{cell[axis]}" for axis in short if cell[axis] > 1]
    parts += ["SP"] if cell["sequence_parallel"] else []
    parts += [] if cell["distributed_optimizer"] else ["plain"]
    parts += [] if cell["recompute"] is Recompute.none else [cell["recompute"]]
    return "-".join([cell["model"], *parts])


def pairs_of(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return every pair of (axis, value) of the cell."""
    return set(combinations(cell.items(), 2))


def pairs_of_cuts(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    """Return every pair of (axis, value) of two cuts, and every single (axis, value)."""
    pairs = combinations([(axis, cell[axis]) for axis in CUTS], 2)
    return {*pairs, *((item,) for item in cell.items())}


def pairwise(grid: list[Cell]) -> list[Cell]:
    """Pick cells that contain every pair of the grid.

    Greedy: most new pairs first, then fewest ranks, then the order of the grid.
    """
    missing = set().union(*map(pairs_of, grid))
    picked = []
    while missing:
        best = max(grid, key=lambda cell: (len(pairs_of(cell) & missing), -num_ranks(cell)))
        picked.append(best)
        missing -= pairs_of(best)
    return picked


def without_redundant(cells: list[Cell]) -> list[Cell]:
    """Leave out, from the last to the first, each cell whose `pairs_of_cuts` the others have."""
    picked = list(cells)
    for cell in reversed(cells):
        others = [other for other in picked if other is not cell]
        if pairs_of_cuts(cell) <= set().union(*map(pairs_of_cuts, others)):
            picked = others
    return picked


GRID = [
    cell
    for values in product(*AXES.values())
    if is_valid(cell := dict(zip(AXES, values, strict=True)))
]
COVER = pairwise(GRID)
QUICK = without_redundant(COVER)
EACH_ONCE = [cell for number, cell in enumerate(GRID) if number % 6 == number // 6 % 6]
"""Each cut of each model once, with both optimizers and the ways to recompute in turn.

These are the last two axes, with six combinations.
"""

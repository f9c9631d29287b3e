"""The grid has every pair of values that can stand together, and so has its small cover."""

from __future__ import annotations

from itertools import combinations, product

from tests.parallel.layouts import AXES, COVER, GRID, QUICK, name_of, pairs_of, pairs_of_cuts


def test_the_cover_is_small_and_has_every_pair_that_the_grid_has():
    assert all(cell in GRID for cell in COVER)
    assert len({name_of(cell) for cell in GRID}) == len(GRID) > 200
    assert len(COVER) <= 20
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, GRID))


def test_the_quick_part_has_every_value_and_every_pair_of_two_cuts():
    assert len(QUICK) <= 8
    assert all(cell in COVER for cell in QUICK)
    assert set().union(*map(pairs_of_cuts, QUICK)) == set().union(*map(pairs_of_cuts, GRID))


def test_only_impossible_pairs_are_missing_from_the_grid():
    present = set().union(*map(pairs_of, GRID))
    every = {
        ((one, left), (other, right))
        for one, other in combinations(AXES, 2)
        for left, right in product(AXES[one], AXES[other])
    }
    dense = ("llama", "qwen2", "qwen3", "qwen3-tied")
    assert every - present == {
        *((("model", name), ("expert", 2)) for name in dense),
        *((("model", name), ("expert_tensor", 2)) for name in dense),
        (("pipeline", 1), ("virtual_pipeline", 2)),
        (("tensor", 1), ("sequence_parallel", True)),
    }

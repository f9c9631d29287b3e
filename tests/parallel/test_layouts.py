from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.layouts import (
    AXES,
    COVER,
    GRID,
    MAX_RANKS,
    is_valid,
    name_of,
    num_ranks,
    pairs_of,
    pairwise,
)


def test_the_cover_meets_every_value_and_every_pair_that_the_grid_has():
    pairs = set().union(*map(pairs_of, COVER))
    assert pairs == set().union(*map(pairs_of, GRID))
    for axis, values in AXES.items():
        assert {cell[axis] for cell in COVER} == set(values)


def test_the_cover_is_small_and_of_the_grid():
    assert all(cell in GRID for cell in COVER)
    assert len({name_of(cell) for cell in GRID}) == len(GRID) > 200
    assert len(COVER) <= 20


def test_only_impossible_pairs_are_missing_from_the_grid():
    present = set().union(*map(pairs_of, GRID))
    every = {
        ((one, left), (other, right))
        for number, one in enumerate(AXES)
        for other in list(AXES)[number + 1 :]
        for left, right in product(AXES[one], AXES[other])
    }
    dense = ("llama", "qwen2", "qwen3", "qwen3-tied")
    assert every - present == {
        *((("model", name), ("expert", 2)) for name in dense),
        *((("model", name), ("expert_tensor", 2)) for name in dense),
        (("pipeline", 1), ("virtual_pipeline", 2)),
        (("tensor", 1), ("sequence_parallel", True)),
    }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"virtual_pipeline": 2}, False),
        ({"pipeline": 2, "virtual_pipeline": 2}, True),
        ({"sequence_parallel": True}, False),
        ({"tensor": 2, "data": 2, "context": 2}, False),
        ({"expert_tensor": 2, "data": 2}, False),
        ({"model": "qwen3_moe", "tensor": 2}, False),
        ({"model": "qwen3_moe", "tensor": 2, "sequence_parallel": True}, True),
        ({"model": "qwen3_moe", "expert": 2}, False),
        ({"model": "qwen3_moe", "expert": 2, "data": 2}, True),
        ({"model": "qwen3_moe", "expert": 2, "expert_tensor": 2, "data": 2}, False),
    ],
)
def test_which_combinations_are_layouts(changed, expected):
    cell = {axis: values[0] for axis, values in AXES.items()} | changed
    assert is_valid(cell) is expected


def test_names_and_ranks():
    cell = {axis: values[0] for axis, values in AXES.items()}
    cell |= {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "sequence_parallel": True}
    assert name_of(cell) == "llama-TP2-PP2-V2-SP-plain"
    assert num_ranks(cell) == MAX_RANKS


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "model": st.sampled_from("xyz"),
                "tensor": st.sampled_from((1, 2)),
                "pipeline": st.sampled_from((1, 2)),
                "data": st.sampled_from((1, 2)),
                "context": st.sampled_from((1, 2)),
            }
        ),
        min_size=1,
        max_size=30,
    )
)
def test_any_grid_is_covered_by_some_of_it(cells):
    picked = pairwise(cells)
    assert all(cell in cells for cell in picked)
    assert set().union(*map(pairs_of, picked)) == set().union(*map(pairs_of, cells))
    assert len(picked) <= len(cells)

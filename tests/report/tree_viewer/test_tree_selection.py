"""Which trees are chosen, by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.tree_viewer.tree_selection import (
    MIN_TREES_PER_FILE,
    TreeFileSize,
    evenly_spaced_indices,
    select_trees,
)


def size(num_bytes, num_trees):
    return TreeFileSize(num_bytes=num_bytes, num_trees=num_trees)


def test_everything_where_it_fits():
    assert select_trees([size(100, 2), size(50, 3)], 150) == [[0, 1], [0, 1, 2]]
    assert select_trees([], 10) == []


def test_what_a_small_file_leaves_goes_to_the_large_one():
    # The small one needs 100 of its 500; the large one gets 900: 9 of its 19 trees of 100 bytes.
    chosen = select_trees([size(1900, 19), size(100, 4)], 1000)
    assert [len(one) for one in chosen] == [9, 4]
    assert chosen[0] == [0, 2, 4, 7, 9, 11, 14, 16, 18]


def test_files_are_left_out_evenly():
    # 4 trees of 10 bytes are wanted of each file: 120 bytes are enough for 3 of 9.
    chosen = select_trees([size(1000, 100)] * 9, 120)
    assert [index for index, one in enumerate(chosen) if one] == [0, 4, 8]
    assert [len(one) for one in chosen if one] == [MIN_TREES_PER_FILE] * 3


def test_files_without_trees():
    assert select_trees([size(0, 0), size(10, 1)], 100) == [[], [0]]


def test_spread():
    assert evenly_spaced_indices(5, 9) == [0, 1, 2, 3, 4]
    assert evenly_spaced_indices(5, 3) == [0, 2, 4]
    assert evenly_spaced_indices(5, 1) == [0]
    assert evenly_spaced_indices(5, 0) == []


sizes = st.builds(size, st.integers(0, 10_000), st.integers(0, 50))


@given(st.lists(sizes, max_size=12), st.integers(0, 20_000))
def test_indices_are_in_their_files_and_first_and_last_are_there(files, budget):
    chosen = select_trees(files, budget)
    for one, file in zip(chosen, files, strict=True):
        assert one == sorted(set(one))
        assert all(0 <= index < file.num_trees for index in one)
    filled = [index for index, file in enumerate(files) if file.num_trees]
    if filled:
        assert chosen[filled[0]] and chosen[filled[-1]]

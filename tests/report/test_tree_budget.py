"""Which trees are chosen, by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.report.tree_budget import FEWEST_TREES, FileSize, choose_trees, spread


def size(num_bytes, num_trees):
    return FileSize(num_bytes=num_bytes, num_trees=num_trees)


def test_everything_where_it_fits():
    assert choose_trees([size(100, 2), size(50, 3)], 150) == [[0, 1], [0, 1, 2]]
    assert choose_trees([], 10) == []


def test_what_a_small_file_leaves_goes_to_the_large_one():
    # The small one needs 100 of its 500; the large one gets 900: 9 of its 19 trees of 100 bytes.
    chosen = choose_trees([size(1900, 19), size(100, 4)], 1000)
    assert [len(one) for one in chosen] == [9, 4]
    assert chosen[0] == [0, 2, 4, 7, 9, 11, 14, 16, 18]


def test_files_are_left_out_evenly():
    # 4 trees of 10 bytes are wanted of each file: 120 bytes are enough for 3 of 9.
    chosen = choose_trees([size(1000, 100)] * 9, 120)
    assert [index for index, one in enumerate(chosen) if one] == [0, 4, 8]
    assert [len(one) for one in chosen if one] == [FEWEST_TREES] * 3


def test_files_without_trees():
    assert choose_trees([size(0, 0), size(10, 1)], 100) == [[], [0]]


def test_spread():
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(5, 3) == [0, 2, 4]
    assert spread(5, 1) == [0]
    assert spread(5, 0) == []


sizes = st.builds(size, st.integers(0, 10_000), st.integers(0, 50))


@given(st.lists(sizes, max_size=12), st.integers(0, 20_000))
def test_indices_are_in_their_files_and_first_and_last_are_there(files, budget):
    chosen = choose_trees(files, budget)
    for one, file in zip(chosen, files, strict=True):
        assert one == sorted(set(one))
        assert all(0 <= index < file.num_trees for index in one)
    filled = [index for index, file in enumerate(files) if file.num_trees]
    if filled:
        assert chosen[filled[0]] and chosen[filled[-1]]

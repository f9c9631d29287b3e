"""The three cuts by hand, and windows that tile a stack."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Rect, check_cover
from mega_agentrl.reshard.mapping.partition import RowRange, replicate, slice_columns, stack_rows


def test_whole_and_columns_by_hand():
    assert replicate("norm", "n", (8,)).blocks[0].hf_rect == Rect((0,), (8,))
    shard = slice_columns("proj", "o", (6, 8), rank=1, size=4)
    assert shard.shape == (6, 2)
    assert shard.blocks[0].hf_rect == Rect((0, 2), (6, 4))
    assert shard.blocks[0].local_rect == Rect((0, 0), (6, 2))


def test_a_window_takes_the_end_of_one_part_and_the_beginning_of_the_next():
    parts = [RowRange("a", 10, 4), RowRange("b", 0, 3)]
    shard = stack_rows("p", parts, (5,), window=(3, 6))
    assert shard.shape == (3, 5)
    assert [(block.hf_name, block.hf_rect, block.local_rect) for block in shard.blocks] == [
        ("a", Rect((13, 0), (14, 5)), Rect((0, 0), (1, 5))),
        ("b", Rect((0, 0), (2, 5)), Rect((1, 0), (3, 5))),
    ]


def test_a_bias_is_cut_like_the_rows_of_its_matrix():
    parts = [RowRange("a", 0, 4), RowRange("b", 4, 2)]
    shard = stack_rows("p", parts, ())
    assert shard.shape == (6,)
    assert shard.blocks[1].hf_rect == Rect((4,), (6,))
    assert shard.blocks[1].local_rect == Rect((4,), (6,))


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    marks=st.lists(st.integers(0, 30), max_size=4),
    tail=st.sampled_from([(), (3,)]),
)
def test_windows_that_tile_the_stack_cover_every_part(counts, marks, tail):
    parts = [RowRange(f"t{index}", 0, count) for index, count in enumerate(counts)]
    total = sum(counts)
    edges = sorted({0, total, *(mark for mark in marks if mark < total)})
    shards = [
        stack_rows(f"w{low}", parts, tail, window=(low, high))
        for low, high in itertools.pairwise(edges)
    ]
    check_cover({part.hf_name: (part.num_rows, *tail) for part in parts}, shards, owner="test")
    assert all(
        sum(block.local_rect.numel for block in shard.blocks) == Rect.whole(shard.shape).numel
        for shard in shards
    )


def test_an_empty_share_is_refused():
    with pytest.raises(ValueError, match="empty"):
        slice_columns("proj", "o", (6, 2), rank=0, size=4)

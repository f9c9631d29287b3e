"""The three cuts by hand, and windows that tile a stack."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Rect, check_cover
from mega_agentrl.reshard.mapping.partition import (
    ModelParallelRank,
    RowRange,
    replicate,
    slice_columns,
    stack_rows,
)


def test_a_single_rank_holds_both_ends_and_has_plain_names():
    parallel_rank = ModelParallelRank()
    assert parallel_rank.param_prefix(0) == ""
    assert parallel_rank.holds_embedding(0)
    assert parallel_rank.holds_output_layer(0)


def test_only_one_chunk_of_one_rank_holds_each_end():
    parallel_ranks = [
        ModelParallelRank(pipeline_rank=rank, pipeline_size=3, virtual_size=2, tensor_size=2)
        for rank in range(3)
    ]
    ends = [
        (rank, chunk, parallel_rank.holds_embedding(chunk), parallel_rank.holds_output_layer(chunk))
        for rank, parallel_rank in enumerate(parallel_ranks)
        for chunk in range(2)
    ]
    assert [end[:2] for end in ends if end[2]] == [(0, 0)]
    assert [end[:2] for end in ends if end[3]] == [(2, 1)]
    assert [parallel_ranks[0].param_prefix(chunk) for chunk in range(2)] == ["chunk0.", "chunk1."]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "expert_tensor"])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_size_is_named(axis, rank):
    with pytest.raises(ValueError, match=rf"{axis}_rank={rank}: expected 0..1"):
        ModelParallelRank(**{f"{axis}_rank": rank, f"{axis}_size": 2})


def test_there_is_at_least_one_chunk():
    with pytest.raises(ValueError, match="virtual_size=0"):
        ModelParallelRank(virtual_size=0)


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

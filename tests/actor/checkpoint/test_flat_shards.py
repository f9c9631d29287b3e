from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.checkpoint.flat_shards import iter_hf_views, rects_of_flat_range
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.partition import RowRange, slice_columns, stack_rows


def test_a_run_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_one():
    # Elements 2..10 of a [3, 4] matrix: two of row 0, all of row 1, three of row 2.
    assert list(rects_of_flat_range((3, 4), 2, 11)) == [
        Rect((0, 2), (1, 4)),
        Rect((1, 0), (2, 4)),
        Rect((2, 0), (3, 3)),
    ]
    assert list(rects_of_flat_range((3, 4), 5, 7)) == [Rect((1, 1), (2, 3))]
    assert list(rects_of_flat_range((3, 4), 0, 12)) == [Rect((0, 0), (3, 4))]
    assert list(rects_of_flat_range((7,), 2, 5)) == [Rect((2,), (5,))]
    assert list(rects_of_flat_range((7,), 3, 3)) == []


@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 6),
    ends=st.tuples(st.integers(0, 36), st.integers(0, 36)),
)
def test_boxes_hold_the_run_in_order(rows, width, ends):
    start, stop = (min(end, rows * width) for end in sorted(ends))
    matrix = torch.arange(rows * width).view(rows, width)
    found = [
        matrix[box.slices].flatten() for box in rects_of_flat_range((rows, width), start, stop)
    ]
    assert torch.cat([*found, torch.tensor([])]).tolist() == list(range(start, stop))
    assert len(found) <= 3


@given(cuts=st.lists(st.integers(0, 48), max_size=3))
def test_runs_of_a_stacked_matrix_write_each_tensor_once(cuts):
    # 3 rows of `a` from its row 1 over 2 rows of `b`, and 3 rows of padding.
    shard = stack_rows("w", [RowRange("a", 1, 3), RowRange("b", 0, 2)], (6,), window=(0, 8))
    local = torch.arange(48.0)
    whole = {"a": torch.full((5, 6), -1.0), "b": torch.full((2, 6), -1.0)}
    edges = [0, *sorted(cuts), 48]
    for start, stop in pairwise(edges):
        for name, rect, view in iter_hf_views(shard, local[start:stop], start):
            assert (whole[name][rect.slices] == -1).all()
            whole[name][rect.slices] = view
    assert whole["a"][[0, 4]].eq(-1).all()
    assert whole["a"][1:4].flatten().tolist() == list(range(18))
    assert whole["b"].flatten().tolist() == list(range(18, 30))


def test_columns_lie_where_the_rank_has_them_and_views_share_memory():
    shard = slice_columns("w", "a", (2, 6), rank=1, size=2)
    local = torch.zeros(6)
    for _, rect, view in iter_hf_views(shard, local[1:5], 1):
        view.fill_(rect.start[0] + 10 * rect.start[1])
    # Row 0 from its second element on, row 1 without its last: columns 4 and 3 of the whole.
    assert local.tolist() == [0, 40, 40, 31, 31, 0]

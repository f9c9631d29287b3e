"""Regions by hand, and by property against marks on single elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.regions import (
    RankSetCache,
    TransferRegion,
    compute_regions,
    rect_owners,
)


def layout(*rects, name="w"):
    """One rank's shards, a parameter for each rectangle."""
    return [
        ShardLayout(f"p{i}", rect.shape, (Block(name, rect, Rect.whole(rect.shape)),))
        for i, rect in enumerate(rects)
    ]


def rows(start, stop):
    return Rect((start, 0), (stop, 4))


def find(trainer_layouts, rollout_layouts, names=("w",)):
    sets = RankSetCache()
    held, wanted = (
        rect_owners(trainer_layouts, sets),
        rect_owners(rollout_layouts, sets, first_rank=len(trainer_layouts)),
    )
    return list(compute_regions(names, held, wanted, sets))


def test_ranks_with_the_same_rectangle_are_one_entry():
    shared = layout(rows(0, 4))
    table = rect_owners([shared, shared, layout(rows(0, 4)), layout(rows(4, 8))], RankSetCache())
    assert table == {"w": {rows(0, 4): (0, 1, 2), rows(4, 8): (3,)}}


def test_equal_sets_of_ranks_are_one_object():
    sets = RankSetCache()
    assert sets.union(((3, 1), (2,))) is sets.union(((1,), (2, 3)))


def test_a_border_on_either_side_cuts():
    trainer_layouts = [layout(rows(0, 4)), layout(rows(4, 8))]
    rollout_layouts = [layout(rows(0, 3)), layout(rows(3, 8))]
    assert find(trainer_layouts, rollout_layouts) == [
        TransferRegion("w", rows(0, 3), (0,), (2,)),
        TransferRegion("w", rows(3, 4), (0,), (3,)),
        TransferRegion("w", rows(4, 8), (1,), (3,)),
    ]


def test_two_blocks_of_one_rank_stay_apart_because_each_has_its_own_place():
    trainer_layouts = [layout(rows(0, 4), rows(4, 8))]
    assert [r.rect for r in find(trainer_layouts, [layout(rows(0, 8))])] == [rows(0, 4), rows(4, 8)]


def test_a_cut_of_another_dim_does_not_split_more_than_it_must():
    columns = [layout(Rect((0, 0), (8, 2))), layout(Rect((0, 2), (8, 4)))]
    found = find([layout(rows(0, 8))], columns)
    assert [r.rect for r in found] == [Rect((0, 0), (8, 2)), Rect((0, 2), (8, 4))]


def test_what_nobody_wants_is_left_out():
    assert [r.rect for r in find([layout(rows(0, 8))], [layout(rows(2, 4))])] == [rows(2, 4)]


def test_what_nobody_holds_is_named():
    with pytest.raises(ValueError, match=r"w Rect\(start=\(4, 0\).*rollout ranks \[1\]"):
        find([layout(rows(0, 4))], [layout(rows(0, 8))])


@st.composite
def rectangles(draw):
    """A few rectangles of a 6 x 4 tensor."""
    pairs = [
        draw(
            st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda p: p[0] < p[1])
        )
        for size in (6, 4)
    ]
    return Rect(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


@settings(deadline=None)
@given(
    st.lists(st.lists(rectangles(), min_size=1, max_size=2), min_size=1, max_size=3),
    st.lists(st.lists(rectangles(), min_size=1, max_size=2), min_size=1, max_size=3),
)
def test_every_wanted_element_is_in_one_region_with_its_ranks(held, wanted):
    whole = Rect.whole((6, 4))
    held = [*held, [whole]]  # so that there is no hole
    trainer_layouts, rollout_layouts = (
        [layout(*rects) for rects in side] for side in (held, wanted)
    )
    count = np.zeros((6, 4), dtype=int)
    for region in find(trainer_layouts, rollout_layouts):
        count[region.rect.slices] += 1
        for ranks, side, first in (
            (region.holders, held, 0),
            (region.receivers, wanted, len(held)),
        ):
            inside = [
                rank
                for rank, rects in enumerate(side, start=first)
                if any(region.rect.intersect(rect) == region.rect for rect in rects)
            ]
            touched = [
                rank
                for rank, rects in enumerate(side, start=first)
                if any(region.rect.intersect(rect) for rect in rects)
            ]
            assert list(ranks) == inside == touched
    expected = np.zeros((6, 4), dtype=int)
    for rects in wanted:
        for rect in rects:
            expected[rect.slices] = 1
    assert (count == expected).all()

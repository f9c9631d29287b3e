"""Regions by hand; `test_planner` executes plans of any layouts made from them."""

from __future__ import annotations

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


def find(trainer_layouts, rollout_layouts):
    sets = RankSetCache()
    held = rect_owners(trainer_layouts, sets)
    wanted = rect_owners(rollout_layouts, sets, first_rank=len(trainer_layouts))
    return list(compute_regions(["w"], held, wanted, sets))


def test_ranks_with_the_same_rectangle_are_one_entry():
    shared = layout(rows(0, 4))
    table = rect_owners([shared, shared, layout(rows(0, 4)), layout(rows(4, 8))], RankSetCache())
    assert table == {"w": {rows(0, 4): (0, 1, 2), rows(4, 8): (3,)}}


def test_equal_sets_of_ranks_are_one_object():
    sets = RankSetCache()
    assert sets.union(((3, 1), (2,))) is sets.union(((1,), (2, 3)))


def test_a_border_of_either_side_ends_a_region():
    trainer_layouts = [layout(rows(0, 4)), layout(rows(4, 8))]
    rollout_layouts = [layout(rows(0, 3)), layout(rows(3, 8))]
    assert find(trainer_layouts, rollout_layouts) == [
        TransferRegion("w", rows(0, 3), (0,), (2,)),
        TransferRegion("w", rows(3, 4), (0,), (3,)),
        TransferRegion("w", rows(4, 8), (1,), (3,)),
    ]


def test_a_region_ends_only_at_borders_that_cross_it():
    columns = [layout(Rect((0, 0), (8, 2))), layout(Rect((0, 2), (8, 4)))]
    found = find([layout(rows(0, 8))], columns)
    assert [r.rect for r in found] == [Rect((0, 0), (8, 2)), Rect((0, 2), (8, 4))]

"""Finding a piece in a rank's shards, also in stacks of experts."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan, Hop, Piece, Place, Places
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout


def shard(name, hf_rect, local_rect, shape):
    return ShardLayout(name, shape, (Block("w", hf_rect, local_rect),))


def test_a_part_of_a_block_is_found_at_its_offset():
    places = Places([shard("p", Rect((8, 2), (16, 6)), Rect((1, 0), (9, 4)), (9, 4))])
    assert places.find(Piece("w", Rect((10, 3), (12, 5)), 16)) == [Place("p", Rect((3, 1), (5, 3)))]


def test_an_expert_is_found_in_its_slice_of_the_stack():
    stack = shard("w13", Rect((0, 0), (4, 8)), Rect((5, 4, 0), (6, 8, 8)), (9, 8, 8))
    assert Places([stack]).find(Piece("w", Rect((1, 0), (3, 8)), 64)) == [
        Place("w13", Rect((5, 5, 0), (6, 7, 8)))
    ]


def test_one_row_of_a_block_of_one_row_and_of_more():
    thin = shard("p", Rect((3, 0), (4, 8)), Rect((0,), (8,)), (8,))
    assert Places([thin]).find(Piece("w", Rect((3, 2), (4, 8)), 24))[0].rect == Rect((2,), (8,))
    thick = shard("p", Rect((3, 0), (6, 8)), Rect((0, 0), (3, 8)), (3, 8))
    piece = Piece("w", Rect((4, 0), (5, 8)), 32)
    assert Places([thick]).find(piece)[0].rect == Rect((1, 0), (2, 8))


def test_a_rank_may_want_a_piece_twice():
    rect = Rect.whole((4, 2))
    places = Places([shard("a", rect, rect, (4, 2)), shard("b", rect, rect, (4, 2))])
    assert [place.param for place in places.find(Piece("w", rect, 32))] == ["a", "b"]


def test_a_piece_across_blocks_or_of_another_tensor_has_no_place():
    places = Places([shard("p", Rect((0, 0), (4, 2)), Rect((0, 0), (4, 2)), (4, 2))])
    for piece in (Piece("w", Rect((3, 0), (5, 2)), 16), Piece("v", Rect((0, 0), (1, 2)), 8)):
        with pytest.raises(ValueError, match=f"{piece.hf_name} Rect.* lies in no block"):
            places.find(piece)


def test_a_rank_sees_its_hops_in_order():
    hops = [(Hop(0, 2), Hop(2, 3)), (Hop(1, 3),), (Hop(0, 3), Hop(3, 2))]
    buckets = tuple(Bucket(i, 4, (), h) for i, h in enumerate(hops))
    plan = DeliveryPlan(2, 2, {}, buckets)
    assert [(b.index, tuple(h)) for b, h in plan.hops_of(2)] == [
        (0, (0, 2)),
        (0, (2, 3)),
        (2, (3, 2)),
    ]
    assert list(plan.sinks) == [2, 3]


def test_a_part_has_the_hops_of_its_ranks_and_the_types_of_their_tensors():
    one = Bucket(0, 8, (Piece("a", Rect((0,), (2,)), 8),), (Hop(0, 2), Hop(2, 3)))
    two = Bucket(1, 4, (Piece("b", Rect((0,), (1,)), 4),), (Hop(1, 3),))
    plan = DeliveryPlan(2, 2, {"a": "float32", "b": "float32"}, (one, two))
    layout = [ShardLayout("p", (2,), (Block("a", Rect((0,), (2,)), Rect((0,), (2,))),))]
    part = plan.part_of([0], [layout])
    assert part.dtype_of == {"a": "float32"}
    assert part.buckets == (Bucket(0, 8, one.pieces, (Hop(0, 2),)),)
    assert part.world_size == plan.world_size
    for rank in range(4):
        part = plan.part_of([rank], [])
        assert next(part.hops_of(rank))[1] == next(plan.hops_of(rank))[1]
    assert plan.part_of([2, 3], []).buckets == plan.buckets

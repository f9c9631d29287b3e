"""Finding a slice in a rank's shards, also in stacks of experts."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.transfer_plan import (
    Bucket,
    Hop,
    ParamSlice,
    ParamSliceIndex,
    TensorSlice,
    TransferPlan,
)


def shard(name, hf_rect, local_rect, shape):
    return ShardLayout(name, shape, (Block("w", hf_rect, local_rect),))


def test_a_part_of_a_block_is_found_at_its_offset():
    param_slices = ParamSliceIndex(
        [shard("p", Rect((8, 2), (16, 6)), Rect((1, 0), (9, 4)), (9, 4))]
    )
    assert param_slices.find(TensorSlice("w", Rect((10, 3), (12, 5)), 16)) == [
        ParamSlice("p", Rect((3, 1), (5, 3)))
    ]


def test_an_expert_is_found_in_its_slice_of_the_stack():
    stack = shard("w13", Rect((0, 0), (4, 8)), Rect((5, 4, 0), (6, 8, 8)), (9, 8, 8))
    assert ParamSliceIndex([stack]).find(TensorSlice("w", Rect((1, 0), (3, 8)), 64)) == [
        ParamSlice("w13", Rect((5, 5, 0), (6, 7, 8)))
    ]


def test_one_row_of_a_block_of_one_row_and_of_more():
    thin = shard("p", Rect((3, 0), (4, 8)), Rect((0,), (8,)), (8,))
    assert ParamSliceIndex([thin]).find(TensorSlice("w", Rect((3, 2), (4, 8)), 24))[0].rect == Rect(
        (2,), (8,)
    )
    thick = shard("p", Rect((3, 0), (6, 8)), Rect((0, 0), (3, 8)), (3, 8))
    tensor_slice = TensorSlice("w", Rect((4, 0), (5, 8)), 32)
    assert ParamSliceIndex([thick]).find(tensor_slice)[0].rect == Rect((1, 0), (2, 8))


def test_a_rank_may_want_a_slice_twice():
    rect = Rect.whole((4, 2))
    param_slices = ParamSliceIndex([shard("a", rect, rect, (4, 2)), shard("b", rect, rect, (4, 2))])
    assert [param_slice.param for param_slice in param_slices.find(TensorSlice("w", rect, 32))] == [
        "a",
        "b",
    ]


def test_a_slice_across_blocks_or_of_another_tensor_has_no_place():
    param_slices = ParamSliceIndex([shard("p", Rect((0, 0), (4, 2)), Rect((0, 0), (4, 2)), (4, 2))])
    for tensor_slice in (
        TensorSlice("w", Rect((3, 0), (5, 2)), 16),
        TensorSlice("v", Rect((0, 0), (1, 2)), 8),
    ):
        with pytest.raises(ValueError, match=f"{tensor_slice.hf_name} Rect.* lies in no block"):
            param_slices.find(tensor_slice)


def test_a_rank_sees_its_hops_in_order():
    hops = [(Hop(0, 2), Hop(2, 3)), (Hop(1, 3),), (Hop(0, 3), Hop(3, 2))]
    buckets = tuple(Bucket(i, 4, (), h) for i, h in enumerate(hops))
    plan = TransferPlan(2, 2, {}, buckets)
    assert [(b.index, tuple(h)) for b, h in plan.hops_of(2)] == [
        (0, (0, 2)),
        (0, (2, 3)),
        (2, (3, 2)),
    ]
    assert list(plan.rollout_ranks) == [2, 3]


def test_a_part_has_the_hops_of_its_ranks_and_the_types_of_their_tensors():
    one = Bucket(0, 8, (TensorSlice("a", Rect((0,), (2,)), 8),), (Hop(0, 2), Hop(2, 3)))
    two = Bucket(1, 4, (TensorSlice("b", Rect((0,), (1,)), 4),), (Hop(1, 3),))
    plan = TransferPlan(2, 2, {"a": "float32", "b": "float32"}, (one, two))
    layout = [ShardLayout("p", (2,), (Block("a", Rect((0,), (2,)), Rect((0,), (2,))),))]
    part = plan.restrict_to([0], [layout])
    assert part.dtype_of == {"a": "float32"}
    assert part.buckets == (Bucket(0, 8, one.slices, (Hop(0, 2),)),)
    assert part.world_size == plan.world_size
    for rank in range(4):
        part = plan.restrict_to([rank], [])
        assert next(part.hops_of(rank))[1] == next(plan.hops_of(rank))[1]
    assert plan.restrict_to([2, 3], []).buckets == plan.buckets

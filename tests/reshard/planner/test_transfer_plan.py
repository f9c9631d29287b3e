"""Finding a slice in a rank's shards, also in stacks of experts."""

from __future__ import annotations

import pytest

from mega_agentrl.errors import InputError
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


@pytest.mark.parametrize(
    ("hf_rect", "local_rect", "rect", "expected"),
    [
        (Rect((8, 2), (16, 6)), Rect((1, 0), (9, 4)), Rect((10, 3), (12, 5)), Rect((3, 1), (5, 3))),
        (
            Rect((0, 0), (4, 8)),
            Rect((5, 4, 0), (6, 8, 8)),
            Rect((1, 0), (3, 8)),
            Rect((5, 5, 0), (6, 7, 8)),
        ),
        (Rect((3, 0), (4, 8)), Rect((0,), (8,)), Rect((3, 2), (4, 8)), Rect((2,), (8,))),
        (Rect((3, 0), (6, 8)), Rect((0, 0), (3, 8)), Rect((4, 0), (5, 8)), Rect((1, 0), (2, 8))),
    ],
    ids=["part-of-a-block", "expert-of-a-stack", "row-as-a-vector", "row-of-a-block"],
)
def test_a_slice_is_found_where_the_shard_holds_it(hf_rect, local_rect, rect, expected):
    index = ParamSliceIndex([shard("p", hf_rect, local_rect, local_rect.stop)])
    assert index.find(TensorSlice("w", rect, 4 * rect.numel)) == [ParamSlice("p", expected)]


def test_a_rank_may_want_a_slice_twice():
    rect = Rect.whole((4, 2))
    index = ParamSliceIndex([shard(name, rect, rect, (4, 2)) for name in "ab"])
    assert [found.param for found in index.find(TensorSlice("w", rect, 32))] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "rect"),
    [("w", Rect((3, 0), (5, 2))), ("v", Rect((0, 0), (1, 2)))],
    ids=["across-blocks", "other-tensor"],
)
def test_a_slice_that_the_rank_does_not_hold_is_named(name, rect):
    whole = Rect((0, 0), (4, 2))
    index = ParamSliceIndex([shard("p", whole, whole, (4, 2))])
    with pytest.raises(InputError) as caught:
        index.find(TensorSlice(name, rect, 8))
    assert caught.value.name == f"blocks of this rank with {name} {rect}"


def test_a_rank_sees_its_hops_in_order():
    hops = [(Hop(0, 2), Hop(2, 3)), (Hop(1, 3),), (Hop(0, 3), Hop(3, 2))]
    buckets = tuple(Bucket(i, 4, (), h) for i, h in enumerate(hops))
    plan = TransferPlan(2, 2, {}, buckets)
    expected = [(0, (0, 2)), (0, (2, 3)), (2, (3, 2))]
    assert [(bucket.index, tuple(hop)) for bucket, hop in plan.hops_of(2)] == expected
    assert list(plan.rollout_ranks) == [2, 3]


def test_a_part_has_the_buckets_of_its_ranks_and_the_types_of_their_tensors():
    one = Bucket(0, 8, (TensorSlice("a", Rect((0,), (2,)), 8),), (Hop(0, 2), Hop(2, 3)))
    two = Bucket(1, 4, (TensorSlice("b", Rect((0,), (1,)), 4),), (Hop(1, 3),))
    plan = TransferPlan(2, 2, {"a": "float32", "b": "float32"}, (one, two))
    first, second, engine = plan.split([[0], [1], [2, 3]], [{"a"}, {"a", "b"}, {"a", "b"}])
    assert (first.buckets, first.dtype_of) == ((one,), {"a": "float32"})
    assert (second.buckets, second.dtype_of) == ((two,), plan.dtype_of)
    assert engine == plan

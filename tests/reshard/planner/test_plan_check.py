"""Every way to spoil a good plan is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.plan_check import check_transfer_plan
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.transfer_plan import Hop
from mega_agentrl.reshard.topology import RankLocation
from tests.reshard.planner.test_regions import layout, rows

TRAINER_LAYOUTS = [layout(rows(0, 4)), layout(rows(4, 8))]
ROLLOUT_LAYOUTS = [layout(rows(0, 8)), layout(rows(0, 2))]
PLAN = plan_transfer(
    TRAINER_LAYOUTS, ROLLOUT_LAYOUTS, [RankLocation(n) for n in range(4)], "float32", names=["w"]
)  # buckets: rows 0-1 to both rollout ranks, rows 2-3 and rows 4-7 to the first


def spoiled(number, **changes):
    buckets = list(PLAN.buckets)
    buckets[number] = replace(buckets[number], **changes)
    return replace(PLAN, buckets=tuple(buckets))


def bucket_of(rect):
    return next(b for b in PLAN.buckets if b.slices[0].rect == rect)


FIRST, SECOND, THIRD = (bucket_of(rect) for rect in (rows(0, 2), rows(2, 4), rows(4, 8)))


def moved(bucket, rect):
    return (bucket.slices[0]._replace(rect=rect),)


def test_a_good_plan_passes():
    assert len(PLAN.buckets) == 3
    check_transfer_plan(PLAN, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            replace(PLAN, buckets=tuple(b for b in PLAN.buckets if b is not SECOND)),
            r"rollout rank 2: 8 of 32 elements of w .* do not arrive",
        ),
        (
            replace(PLAN, buckets=(*PLAN.buckets, replace(FIRST, hops=(Hop(0, 3),)))),
            r"rollout rank 3: w holds .* overlap",
        ),
        (spoiled(SECOND.index, slices=moved(SECOND, rows(1, 3))), r"rollout rank 2: w .* overlap"),
        (spoiled(THIRD.index, slices=moved(THIRD, rows(3, 8))), r"w Rect.* lies in no block"),
        (spoiled(THIRD.index, hops=(Hop(0, 2),)), r"w Rect.* lies in no block"),
        (
            spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 3))),
            r"rank 3: w .* arrives but the rank does not hold it",
        ),
        (spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 2))), "to rank 2 twice"),
        (spoiled(SECOND.index, hops=(Hop(3, 2),)), r"rank 3 forwards bucket .*w Rect.* before"),
        (spoiled(SECOND.index, hops=(Hop(0, 1),)), "to rank 1 which is not a rollout rank"),
    ],
)
def test_a_spoiled_plan_is_named(plan, message):
    with pytest.raises(ValueError, match=message):
        check_transfer_plan(plan, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)


def test_ranks_that_share_a_layout_are_told_apart_by_what_they_get():
    shared = layout(rows(0, 8))
    locations = [RankLocation(n) for n in range(4)]
    plan = plan_transfer(TRAINER_LAYOUTS, [shared, shared], locations, "float32", names=["w"])
    last = plan.buckets[-1]
    cut = replace(last, hops=last.hops[:1])
    with pytest.raises(ValueError, match="rollout rank 3: 16 of 32"):
        check_transfer_plan(
            replace(plan, buckets=(*plan.buckets[:-1], cut)), TRAINER_LAYOUTS, [shared, shared]
        )
    assert Rect.whole((8, 4)) == rows(0, 8)

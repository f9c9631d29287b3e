"""Every way to spoil a good plan is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.reshard.delivery import Hop
from mega_agentrl.reshard.delivery_check import check_delivery
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.plan import plan_delivery
from tests.reshard.test_regions import layout, rows

SOURCES = [layout(rows(0, 4)), layout(rows(4, 8))]
SINKS = [layout(rows(0, 8)), layout(rows(0, 2))]
PLAN = plan_delivery(
    SOURCES, SINKS, [Location(n) for n in range(4)], "float32", names=["w"]
)  # buckets: rows 0-1 to both sinks, rows 2-3 and rows 4-7 to the first


def spoiled(number, **changes):
    buckets = list(PLAN.buckets)
    buckets[number] = replace(buckets[number], **changes)
    return replace(PLAN, buckets=tuple(buckets))


def bucket_of(rect):
    return next(b for b in PLAN.buckets if b.pieces[0].rect == rect)


FIRST, SECOND, THIRD = (bucket_of(rect) for rect in (rows(0, 2), rows(2, 4), rows(4, 8)))


def moved(bucket, rect):
    return (bucket.pieces[0]._replace(rect=rect),)


def test_a_good_plan_passes():
    assert len(PLAN.buckets) == 3
    check_delivery(PLAN, SOURCES, SINKS)


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
        (spoiled(SECOND.index, pieces=moved(SECOND, rows(1, 3))), r"rollout rank 2: w .* overlap"),
        (spoiled(THIRD.index, pieces=moved(THIRD, rows(3, 8))), r"w Rect.* lies in no block"),
        (spoiled(THIRD.index, hops=(Hop(0, 2),)), r"w Rect.* lies in no block"),
        (
            spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 3))),
            r"rank 3: w .* arrives and has no place",
        ),
        (spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 2))), "to rank 2 twice"),
        (spoiled(SECOND.index, hops=(Hop(3, 2),)), r"rank 3 passes on bucket .*w Rect.* before"),
        (spoiled(SECOND.index, hops=(Hop(0, 1),)), "to rank 1 which is no rollout rank"),
    ],
)
def test_a_spoiled_plan_is_named(plan, message):
    with pytest.raises(ValueError, match=message):
        check_delivery(plan, SOURCES, SINKS)


def test_ranks_that_share_a_layout_are_told_apart_by_what_they_get():
    shared = layout(rows(0, 8))
    places = [Location(n) for n in range(4)]
    plan = plan_delivery(SOURCES, [shared, shared], places, "float32", names=["w"])
    last = plan.buckets[-1]
    cut = replace(last, hops=last.hops[:1])
    with pytest.raises(ValueError, match="rollout rank 3: 16 of 32"):
        check_delivery(replace(plan, buckets=(*plan.buckets[:-1], cut)), SOURCES, [shared, shared])
    assert Rect.whole((8, 4)) == rows(0, 8)

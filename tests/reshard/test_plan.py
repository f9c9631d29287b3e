"""Plans by hand and by property: every element once, balanced, in one order, cut to size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover
from mega_agentrl.reshard.plan import make_plan


def rows_of(name, start, stop, columns, *, param=None):
    """A shard that is rows [start, stop) of a tensor."""
    shape = (stop - start, columns)
    hf_rect = Rect((start, 0), (stop, columns))
    return ShardLayout(param or f"m.{name}", shape, (Block(name, hf_rect, Rect.whole(shape)),))


def whole(name, *shape, param=None):
    return ShardLayout(
        param or f"m.{name}", shape, (Block(name, Rect.whole(shape), Rect.whole(shape)),)
    )


def sent_rects(plan, name):
    return sorted(
        piece.block.hf_rect
        for message in plan.messages
        for piece in message.pieces
        if piece.block.hf_name == name
    )


def test_each_rank_sends_its_half_and_one_of_them_the_replica():
    ranks = [
        [rows_of("w", 0, 4, 8), whole("norm", 8)],
        [rows_of("w", 4, 8, 8), whole("norm", 8)],
    ]
    plan = make_plan(ranks, {"w": (8, 8), "norm": (8,)}, "float32", 3)
    assert plan.sent_bytes() == {0: 4 * 8 * 4 + 8 * 4, 1: 4 * 8 * 4}
    assert sent_rects(plan, "norm") == [Rect((0,), (8,))]
    assert [message.source for message in plan.messages] == [0, 1]
    assert list(plan.sinks) == [2, 3, 4]


def test_data_parallel_replicas_share_the_load():
    shards = [whole(f"w{index}", 4, 4) for index in range(6)]
    plan = make_plan([shards, shards, shards], {f"w{i}": (4, 4) for i in range(6)}, "bfloat16", 1)
    assert plan.sent_bytes() == {0: 64, 1: 64, 2: 64}


def test_tied_embedding_copies_of_two_stages_are_sent_once():
    first = [whole("embed", 6, 2, param="embedding.weight"), whole("a", 6, 2)]
    last = [whole("embed", 6, 2, param="output.weight"), whole("b", 6, 2)]
    plan = make_plan([first, last], {"embed": (6, 2), "a": (6, 2), "b": (6, 2)}, "float32", 1)
    assert len(sent_rects(plan, "embed")) == 1


def test_big_blocks_are_cut_along_rows_on_both_sides():
    shard = ShardLayout(
        "fc1", (10, 4), (Block("up", Rect((20, 0), (28, 4)), Rect((2, 0), (10, 4))),)
    )
    others = rows_of("up", 0, 20, 4, param="other")
    plan = make_plan([[shard, others]], {"up": (28, 4)}, "float32", 1, bucket_bytes=3 * 16)
    pieces = [p for m in plan.messages for p in m.pieces if p.param == "fc1"]
    assert [(p.block.hf_rect.start[0], p.block.local_rect.start[0]) for p in pieces] == [
        (20, 2),
        (23, 5),
        (26, 8),
    ]
    assert [p.num_bytes for p in pieces] == [48, 48, 32]
    assert all(message.num_bytes <= 48 for message in plan.messages)


@pytest.mark.parametrize(
    ("ranks", "shapes", "dtype", "message"),
    [
        ([[rows_of("w", 0, 4, 2)]], {"w": (8, 2)}, "float32", "8 of 16 elements of w"),
        ([[whole("w", 8, 2)]], {"w": (8, 2), "v": (3,)}, "float32", "'v'"),
        ([[whole("w", 8, 2), whole("x", 2)]], {"w": (8, 2)}, "float32", "'x'"),
        ([[rows_of("w", 0, 5, 2)], [rows_of("w", 4, 8, 2)]], {"w": (8, 2)}, "float32", "overlap"),
        ([[whole("w", 8, 2)]], {"w": (8, 2)}, "int8", "dtype=int8"),
    ],
)
def test_what_does_not_fit_is_named(ranks, shapes, dtype, message):
    with pytest.raises(ValueError, match=message):
        make_plan(ranks, shapes, dtype, 1)


@settings(deadline=None, max_examples=60)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 3),
    rows=st.lists(st.integers(1, 5).map(lambda n: 4 * n), min_size=1, max_size=5),
    bucket_bytes=st.integers(1, 400),
)
def test_any_layout_is_covered_once_in_bounded_messages(tensor, data, rows, bucket_bytes):
    shapes = {f"w{index}": (count, 3) for index, count in enumerate(rows)}
    ranks = [
        [
            rows_of(name, shape[0] // tensor * part, shape[0] // tensor * (part + 1), 3)
            for name, shape in shapes.items()
        ]
        for _ in range(data)
        for part in range(tensor)
    ]
    plan = make_plan(ranks, shapes, "float32", 2, bucket_bytes=bucket_bytes)
    assert plan == make_plan(ranks, shapes, "float32", 2, bucket_bytes=bucket_bytes)
    pieces = [piece for message in plan.messages for piece in message.pieces]
    sent = [ShardLayout("s", p.block.local_rect.stop, (p.block,)) for p in pieces]
    check_cover(shapes, sent, owner="test")
    assert [message.index for message in plan.messages] == list(range(len(plan.messages)))
    assert all(m.num_bytes <= max(bucket_bytes, 12) for m in plan.messages)
    loads = plan.sent_bytes().values()
    assert sum(loads) == sum(rows) * 3 * 4
    assert max(loads) - min(loads) <= max(rows) // tensor * 12

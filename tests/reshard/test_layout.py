"""Rectangles, blocks and covers, by hand and for random cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover, round_up


def boxes(max_side=6):
    """A rectangle of rank 2 somewhere near the origin."""
    side = st.tuples(st.integers(0, max_side), st.integers(1, max_side))
    return st.tuples(side, side).map(
        lambda s: Rect((s[0][0], s[1][0]), (s[0][0] + s[0][1], s[1][0] + s[1][1]))
    )


def points(rect):
    return set(itertools.product(*map(range, rect.start, rect.stop)))


def shard(name, *rects, tensor="w"):
    """A shard that stacks its rectangles row-wise."""
    row, blocks = 0, []
    for rect in rects:
        local = Rect((row, 0), (row + rect.shape[0], rect.shape[1]))
        blocks.append(Block(tensor, rect, local))
        row += rect.shape[0]
    return ShardLayout(name, (row, max(rect.shape[1] for rect in rects)), tuple(blocks))


@pytest.mark.parametrize(
    ("start", "stop"),
    [((0,), (1, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 2)), ((-1, 0), (1, 1))],
    ids=["other-rank", "empty", "reversed", "negative"],
)
def test_empty_negative_and_mixed_rectangles_are_refused(start, stop):
    with pytest.raises(ValueError):
        Rect(start, stop)


@given(boxes(), boxes())
def test_the_intersection_is_the_set_of_common_points_in_either_order(one, other):
    common = one.intersect(other)
    assert common == other.intersect(one)
    assert (points(common) if common else set()) == points(one) & points(other)


def test_a_block_has_one_shape_on_both_sides_except_for_dims_of_one_element():
    Block("w", Rect.whole((2, 3)), Rect((4, 0, 0), (5, 2, 3)))  # one slice of a stack
    for local_rect in (Rect.whole((3, 2)), Rect((4, 0, 0), (6, 2, 3))):
        with pytest.raises(ValueError):
            Block("w", Rect.whole((2, 3)), local_rect)


@pytest.mark.parametrize(
    ("shards", "name", "got"),
    [
        ([shard("p", Rect((0, 0), (6, 3)))], "policy, elements of w in no shard", 6),
        (
            [shard("p", Rect((0, 0), (5, 3))), shard("p", Rect((4, 0), (8, 3)))],
            "policy, blocks of w",
            (Rect((0, 0), (5, 3)), Rect((4, 0), (8, 3))),
        ),
        ([shard("p", Rect((0, 0), (9, 3)))], "policy, block of w", Rect((0, 0), (9, 3))),
        (
            [shard("p", Rect.whole((8, 3)), tensor="x")],
            "policy, tensors",
            {"tensors that no shard holds": ["w"], "unknown tensors": ["x"]},
        ),
    ],
    ids=["hole", "overlap", "outside", "other-tensor"],
)
def test_shards_that_are_no_cover_are_refused(shards, name, got):
    with pytest.raises(InputError) as caught:
        check_cover({"w": (8, 3)}, shards, owner="policy")
    assert (caught.value.name, caught.value.got) == (name, got)


@st.composite
def cuts(draw):
    """A tensor cut along its rows at random places and dealt out to random ranks."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    marks = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=5))})
    slices = [Rect((a, 0), (b, columns)) for a, b in itertools.pairwise(marks)]
    owners = draw(st.lists(st.integers(0, 2), min_size=len(slices), max_size=len(slices)))
    ranks = [[p for p, o in zip(slices, owners, strict=True) if o == rank] for rank in range(3)]
    return (rows, columns), [shard(f"rank{i}", *held) for i, held in enumerate(ranks) if held]


@given(cuts())
def test_any_cut_is_a_cover_and_losing_or_doubling_a_slice_is_not(cut):
    shape, shards = cut
    check_cover({"w": shape}, shards, owner="test")
    with pytest.raises(InputError) as caught:
        check_cover({"w": shape}, shards[1:], owner="test")
    assert caught.value.name in ("test, elements of w in no shard", "test, tensors")
    with pytest.raises(InputError) as caught:
        check_cover({"w": shape}, [*shards, shards[0]], owner="test")
    assert caught.value.name == "test, blocks of w"


@given(st.integers(0, 1000), st.integers(1, 64))
def test_rounding_up_adds_less_than_one_multiple(number, multiple):
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - number < multiple

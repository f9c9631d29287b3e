"""Rectangles, blocks and covers, by hand and for random cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover, round_up


def boxes(max_side=6):
    """A rectangle of rank 2 somewhere near the origin."""
    side = st.tuples(st.integers(0, max_side), st.integers(1, max_side))
    return st.tuples(side, side).map(
        lambda s: Rect((s[0][0], s[1][0]), (s[0][0] + s[0][1], s[1][0] + s[1][1]))
    )


def points(rect):
    return {
        (r, c)
        for r in range(rect.start[0], rect.stop[0])
        for c in range(rect.start[1], rect.stop[1])
    }


def shard(name, *rects, tensor="w"):
    """A shard that stacks its rectangles row-wise."""
    row, blocks = 0, []
    for rect in rects:
        local = Rect((row, 0), (row + rect.shape[0], rect.shape[1]))
        blocks.append(Block(tensor, rect, local))
        row += rect.shape[0]
    return ShardLayout(name, (row, max(rect.shape[1] for rect in rects)), tuple(blocks))


def test_shape_numel_and_slices():
    rect = Rect((8, 0), (16, 128))
    assert rect.shape == (8, 128)
    assert rect.numel == 1024
    assert rect.slices == (slice(8, 16), slice(0, 128))
    assert Rect.whole((3, 2)) == Rect((0, 0), (3, 2))


@pytest.mark.parametrize(
    ("start", "stop"), [((0,), (1, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 2)), ((-1, 0), (1, 1))]
)
def test_empty_negative_and_mixed_rectangles_are_refused(start, stop):
    with pytest.raises(ValueError, match="Rect"):
        Rect(start, stop)


def test_intersect_by_hand():
    assert Rect((0, 0), (4, 4)).intersect(Rect((2, 3), (6, 8))) == Rect((2, 3), (4, 4))
    assert Rect((0, 0), (4, 4)).intersect(Rect((4, 0), (6, 4))) is None


@given(boxes(), boxes())
def test_intersect_is_the_set_of_common_points_either_way_round(one, other):
    common = one.intersect(other)
    assert common == other.intersect(one)
    assert (points(common) if common else set()) == points(one) & points(other)


@given(boxes(), st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_shifting_there_and_back_changes_nothing(rect, to):
    moved = rect.translate(rect.start, to)
    assert moved.start == to
    assert moved.shape == rect.shape
    assert moved.translate(to, rect.start) == rect


def test_a_block_keeps_its_shape():
    with pytest.raises(ValueError, match=r"Block of w: \(2, 3\) .* \(3, 2\)"):
        Block("w", Rect.whole((2, 3)), Rect.whole((3, 2)))


def test_a_block_may_be_one_slice_of_a_stack():
    assert Block("w", Rect.whole((2, 3)), Rect((4, 0, 0), (5, 2, 3))).local_rect.squeezed_shape == (
        2,
        3,
    )
    with pytest.raises(ValueError, match="Block of w"):
        Block("w", Rect.whole((2, 3)), Rect((4, 0, 0), (6, 2, 3)))


def test_an_interleaved_cut_over_two_ranks_is_a_cover():
    # rows 0-1 and 4-5 on rank 0, rows 2-3 and 6-7 on rank 1, as grouped QKV rows are
    first = shard("p", Rect((0, 0), (2, 3)), Rect((4, 0), (6, 3)))
    second = shard("p", Rect((2, 0), (4, 3)), Rect((6, 0), (8, 3)))
    check_cover({"w": (8, 3)}, [first, second], owner="test")


def test_a_hole_is_counted():
    with pytest.raises(ValueError, match="policy: 6 of 24 elements of w are in no shard"):
        check_cover({"w": (8, 3)}, [shard("p", Rect((0, 0), (6, 3)))], owner="policy")


def test_an_overlap_names_both_rectangles():
    shards = [shard("p", Rect((0, 0), (5, 3))), shard("p", Rect((4, 0), (8, 3)))]
    with pytest.raises(ValueError, match=r"w holds .*\(0, 0\).*\(4, 0\).*overlap"):
        check_cover({"w": (8, 3)}, shards, owner="policy")


def test_a_block_outside_its_tensor_is_refused():
    with pytest.raises(ValueError, match=r"w has shape \(8, 3\), a block reaches"):
        check_cover({"w": (8, 3)}, [shard("p", Rect((0, 0), (9, 3)))], owner="policy")


def test_unknown_and_missing_tensors_are_listed():
    shards = [shard("p", Rect.whole((2, 2)), tensor="x")]
    with pytest.raises(ValueError, match=r"that no shard holds \['w'\].*does not have \['x'\]"):
        check_cover({"w": (2, 2)}, shards, owner="policy")


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
    with pytest.raises(ValueError, match=r"in no shard|that no shard holds"):
        check_cover({"w": shape}, shards[1:], owner="test")
    with pytest.raises(ValueError, match="overlap"):
        check_cover({"w": shape}, [*shards, shards[0]], owner="test")


@given(st.integers(0, 1000), st.integers(1, 64))
def test_rounding_up_adds_less_than_one_multiple(number, multiple):
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - number < multiple

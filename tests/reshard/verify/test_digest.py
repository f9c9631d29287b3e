"""The checksum by hand, its sum over any cut, and the accidents that it detects."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.verify.digest import compute_digests

COLUMN, ROW_1, ROW_2 = range(3)
MASK = 2**64 - 1
WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DTYPES = st.sampled_from(sorted(WORD, key=str))


def factor(kind, position):
    """SplitMix64 of the position, its upper half, made odd; in plain integers."""
    mixed = (position + 1 + (kind << 40)) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) >> 32 | 1


def by_hand(values, rect):
    """The formula of the module, element by element."""
    rows, columns = ([0, *rect.start][-2], rect.start[-1])
    bits_RC = values.reshape(-1, values.shape[-1]).contiguous().view(WORD[values.dtype])
    total = [0, 0]
    for (r, c), number in np.ndenumerate(bits_RC.numpy()):
        column = columns + c
        if values.dtype is torch.float32:
            word = int(number) * factor(COLUMN, column)
        else:
            word = (int(number) & 0xFFFF) << 16 * (column % 2)
            word *= factor(COLUMN, column // 2)
        for k, kind in enumerate((ROW_1, ROW_2)):
            total[k] += factor(kind, rows + r) * word
    return [number % 2**32 for number in total]


def digest(values, start=None):
    """Of one rectangle, by default at the origin."""
    rect = Rect.whole(tuple(values.shape))
    if start is not None:
        rect = rect.translate((0,) * len(start), start)
    return compute_digests([(values, rect)])[0].tolist()


def some_values(rows, columns, dtype, seed=0):
    """Any bits at all, NaN and infinity included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (rows, columns * 2), generator=generator)
    words = bits.to(torch.int16)
    if WORD[dtype] is torch.int32:
        return words.view(torch.int32).view(dtype)
    return words[:, :columns].contiguous().view(dtype)


def test_the_digest_of_one_word_is_the_product_of_its_factors():
    # SplitMix64 of seed 0 is known: its first outputs are e220a8397b1dcdaf, 6e789e6aa1b965f4.
    assert [factor(COLUMN, 0), factor(COLUMN, 1)] == [0xE220A839, 0x6E789E6A | 1]
    one = torch.tensor([[1]], dtype=torch.int32).view(torch.float32)
    expected = [0xE220A839 * factor(kind, 0) % 2**32 for kind in (ROW_1, ROW_2)]
    assert digest(one) == expected


@given(DTYPES, st.integers(1, 5), st.integers(1, 9), st.integers(0, 7), st.integers(0, 7))
def test_the_digest_is_the_formula(dtype, rows, columns, first_row, first_column):
    values = some_values(rows, columns, dtype)
    start = (first_row, first_column)
    rect = Rect.whole((rows, columns)).translate((0, 0), start)
    assert digest(values, start) == by_hand(values, rect)


def test_the_digest_is_the_formula_past_the_first_table():
    values = some_values(2, 3, torch.bfloat16)
    rect = Rect((70_000, 99_999), (70_002, 100_002))
    assert digest(values, rect.start) == by_hand(values, rect)


@st.composite
def cuts(draw, size):
    """Borders of a side, both ends included."""
    inside = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    return [0, *sorted(inside), size]


@given(st.data(), DTYPES, st.integers(1, 12), st.integers(1, 17))
def test_digests_of_any_cut_sum_to_the_digest_of_the_whole(data, dtype, rows, columns):
    values = some_values(rows, columns, dtype)
    row_cuts, column_cuts = data.draw(cuts(rows)), data.draw(cuts(columns))
    items = []
    for (a, b), (c, d) in itertools.product(
        itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)
    ):
        rect = Rect((a, c), (b, d))
        view = values[rect.slices]  # of the whole tensor, or packed, as it is in a frame
        items.append((view.contiguous() if data.draw(st.booleans()) else view, rect))
    total = compute_digests(items).sum(axis=0, dtype=np.uint32)
    assert total.tolist() == digest(values)


@given(DTYPES, st.integers(1, 4), st.integers(1, 9), st.integers(0, 2), st.integers(0, 3))
def test_views_of_any_stride_give_the_same_number(dtype, rows, columns, before, after):
    values = some_values(rows, columns, dtype)
    wide = torch.zeros(rows * 2, before + columns + after, dtype=dtype)
    cut = wide[::2, before : before + columns]
    cut.copy_(values)
    turned = torch.empty(columns, rows, dtype=dtype).t()
    turned.copy_(values)
    # Assignment keeps bits, NaN payloads as well: all three are the same type.
    assert digest(cut, (3, 5)) == digest(turned, (3, 5)) == digest(values, (3, 5))


@given(st.data(), DTYPES, st.integers(2, 6), st.integers(2, 9))
def test_exchanged_rows_columns_and_elements_are_detected(data, dtype, rows, columns):
    values = some_values(rows, columns, dtype)
    one, two = data.draw(st.permutations(range(rows)))[:2]
    three, four = data.draw(st.permutations(range(columns)))[:2]
    by_row, by_column, by_element = values.clone(), values.clone(), values.clone()
    by_row[[one, two]] = values[[two, one]]
    by_column[:, [three, four]] = values[:, [four, three]]
    by_element[one, three], by_element[two, four] = values[two, four], values[one, three]
    for changed in (by_row, by_column, by_element):
        word = WORD[dtype]
        same = torch.equal(changed.view(word), values.view(word))
        assert (digest(changed) == digest(values)) == same


@given(DTYPES, st.integers(1, 9), st.integers(0, 5))
def test_a_vector_is_one_row(dtype, size, start):
    values = some_values(1, size, dtype)
    assert digest(values[0], (start,)) == digest(values, (0, start))


@given(DTYPES, st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.data())
def test_dims_behind_the_first_are_columns(dtype, rows, height, width, data):
    values = some_values(rows, height * width, dtype)
    cut = data.draw(st.integers(1, rows - 1))
    cube, whole = values.view(rows, height, width), Rect.whole((rows, height, width))
    parts = [Rect((0, 0, 0), (cut, height, width)), Rect((cut, 0, 0), whole.stop)]
    total = compute_digests([(cube[rect.slices], rect) for rect in parts])
    assert compute_digests([(cube, whole)])[0].tolist() == digest(values)
    assert total.sum(axis=0, dtype=np.uint32).tolist() == digest(values)


def test_several_items_have_a_digest_each_and_none_has_none():
    values = [some_values(2, 3, torch.float32, seed) for seed in range(3)]
    assert compute_digests([]).shape == (0, 2)
    found = compute_digests((v, Rect.whole((2, 3))) for v in values)
    assert found.dtype == np.uint32
    assert found.tolist() == [digest(v) for v in values]


@pytest.mark.parametrize(
    ("shape", "dtype", "rect", "name"),
    [
        ((2, 3), torch.float32, Rect.whole((3, 2)), "values of a digest"),
        ((2, 3), torch.int8, Rect.whole((2, 3)), "values of a digest"),
        ((2, 3), torch.float64, Rect.whole((2, 3)), "values of a digest"),
        ((1, 2, 3), torch.float32, Rect((0, 1, 0), (1, 3, 3)), "rectangle of a digest"),
    ],
    ids=["shape", "8-bits", "64-bits", "part-of-a-row"],
)
def test_other_types_and_shapes_are_refused(shape, dtype, rect, name):
    with pytest.raises(InputError) as caught:
        compute_digests([(torch.zeros(shape, dtype=dtype), rect)])
    assert caught.value.name == name

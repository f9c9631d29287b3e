from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_accumulator import DigestAccumulator, ParamBlock

UPPER = ParamBlock("p", Rect((0, 0), (4, 6)), Rect((10, 2), (14, 8)))
LOWER = ParamBlock("p", Rect((4, 0), (8, 6)), Rect((0, 0), (4, 6)))


def filled(dtype=torch.float32):
    return torch.arange(48, dtype=torch.float32).reshape(8, 6).to(dtype)


def put(accumulator, parameter, values, start, stop):
    rect = Rect(start, stop)
    accumulator.copy(ParamSlice("p", rect), parameter[rect.slices], values[rect.slices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_to_the_digest_of_what_is_there(dtype):
    accumulator, parameter, values = (
        DigestAccumulator([UPPER, LOWER]),
        torch.zeros(8, 6, dtype=dtype),
        filled(dtype),
    )
    put(accumulator, parameter, values, (0, 0), (1, 6))
    put(accumulator, parameter, values, (1, 0), (4, 2))
    assert accumulator.digest_of_block(0) is None, "half of it is missing"
    put(accumulator, parameter, values, (1, 2), (4, 6))
    assert torch.equal(parameter[:4], values[:4])
    assert (
        accumulator.digest_of_block(0) == compute_digests([(values[:4], UPPER.hf_rect)])[0]
    ).all()
    assert accumulator.digest_of_block(1) is None
    accumulator.reset()
    assert accumulator.digest_of_block(0) is None


def test_what_is_written_twice_has_no_digest():
    accumulator, parameter, values = DigestAccumulator([UPPER, LOWER]), torch.zeros(8, 6), filled()
    put(accumulator, parameter, values, (0, 0), (4, 6))
    put(accumulator, parameter, values + 1, (3, 0), (4, 6))
    assert accumulator.digest_of_block(0) is None
    assert torch.equal(parameter[3], values[3] + 1), "it is copied all the same"


def test_what_reaches_over_two_spans_spoils_both():
    accumulator, parameter, values = DigestAccumulator([UPPER, LOWER]), torch.zeros(8, 6), filled()
    put(accumulator, parameter, values, (4, 0), (8, 6))
    put(accumulator, parameter, values, (3, 0), (5, 6))
    put(accumulator, parameter, values, (0, 0), (3, 6))
    assert accumulator.digest_of_block(0) is None and accumulator.digest_of_block(1) is None


def test_a_copy_that_changes_the_type_is_made_and_not_counted():
    accumulator, parameter, values = (
        DigestAccumulator([UPPER]),
        torch.zeros(8, 6, dtype=torch.bfloat16),
        filled(),
    )
    put(accumulator, parameter, values, (0, 0), (4, 6))
    assert (
        torch.equal(parameter[:4], values[:4].bfloat16()) and accumulator.digest_of_block(0) is None
    )


def test_an_expert_is_one_slice_of_a_stack():
    span = ParamBlock("p", Rect((1, 0, 0), (2, 4, 6)), Rect((0, 0), (4, 6)))
    accumulator, parameter = DigestAccumulator([span]), torch.zeros(3, 4, 6)
    values = filled()[:4]
    accumulator.copy(ParamSlice("p", span.local_rect), parameter[span.local_rect.slices], values)
    assert torch.equal(parameter[1], values)
    assert (accumulator.digest_of_block(0) == compute_digests([(values, span.hf_rect)])[0]).all()


@given(
    rows=st.lists(st.integers(1, 7), max_size=3),
    columns=st.lists(st.integers(1, 5), max_size=2),
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_digest_of_the_whole(rows, columns, at, seed):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    hf_rect = Rect(at, (at[0] + 8, at[1] + 6))
    accumulator, parameter = (
        DigestAccumulator([ParamBlock("p", Rect((0, 0), (8, 6)), hf_rect)]),
        torch.zeros(8, 6),
    )
    rows, columns = sorted({0, 8, *rows}), sorted({0, 6, *columns})
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            put(accumulator, parameter, values, (top, left), (bottom, right))
    assert (accumulator.digest_of_block(0) == compute_digests([(values, hf_rect)])[0]).all()

"""Sums and products that have the same bits in any order, and the accuracy they have."""

import math

import pytest
import torch

from mega_agentrl.numerics.exact_sums import (
    FixedPointRows,
    exact_matmul,
    exact_sum,
    power_above,
)


def product(left, right, num_terms=None):
    rows = FixedPointRows.from_rows(right)
    return exact_matmul(left, rows, num_terms=num_terms or left.size(-1))


@pytest.fixture
def factors():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(9, 300, generator=generator) * torch.logspace(-6, 6, 9)[:, None]
    return left, torch.randn(20, 300, generator=generator)


@pytest.mark.parametrize(
    ("value", "power"), [(1.0, 2.0), (0.75, 1.0), (-3.0, 4.0), (0.0, 2.0**-499)]
)
def test_the_power_is_above_the_largest_magnitude(value, power):
    rows = torch.tensor([[value / 2, value, 0.0]], dtype=torch.float64)
    assert power_above(rows).tolist() == [[power]]


def test_a_product_does_not_depend_on_the_order_of_its_terms(factors):
    left, right = factors
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(left[:, order], right[:, order]), product(left, right))


def test_a_product_does_not_depend_on_the_rows_beside_it(factors):
    left, right = factors
    alone = torch.cat([product(row[None], right) for row in left])
    assert torch.equal(alone, product(left, right))
    assert torch.equal(product(left, right[3:5]), product(left, right)[:, 3:5])


def test_zeros_as_padding_change_nothing(factors):
    left, right = factors
    padded = torch.nn.functional.pad(left, (0, 200)), torch.nn.functional.pad(right, (0, 200))
    assert torch.equal(product(*padded, num_terms=512), product(left, right, num_terms=512))


def test_a_product_is_more_accurate_than_float32(factors):
    left, right = factors
    expected = left.double() @ right.double().T
    bound = left.abs().double() @ right.abs().double().T
    error = ((product(left, right) - expected).abs() / bound).max()
    assert error < ((left @ right.T - expected).abs() / bound).max()
    assert error < 2**-24


def test_the_largest_product_of_whole_numbers_is_exact():
    num_terms = 1 << 14
    left = torch.full((1, num_terms), 2.0**24 - 1)
    expected = (2**24 - 1) ** 2 * num_terms
    # Both factors have more bits than a slice, so the sum is that of the rounded ones.
    assert product(left, left).item() == pytest.approx(expected, rel=2**-29)
    small = torch.full((1, num_terms), 1023.0)
    assert product(small, small).item() == 1023**2 * num_terms


def test_rows_of_zeros_give_zeros_and_values_that_are_not_finite_stay_so():
    right = torch.eye(3)
    left = torch.tensor([[0.0, 0, 0], [math.nan, 1, 0], [math.inf, 1, 0], [1, 2, 3]])
    got = product(left, right)
    assert got[0].tolist() == [0, 0, 0]
    assert not got[1].isfinite().any()
    assert not got[2].isfinite().any()
    assert got[3].tolist() == [1, 2, 3]


def test_a_sum_has_the_same_bits_in_any_order():
    terms = torch.rand(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = exact_sum(terms, 1 << 20)
    assert torch.equal(exact_sum(terms.flip(-1), 1 << 20), sums)
    halves = [exact_sum(part, 1 << 20) for part in terms.chunk(2, dim=-1)]
    assert torch.equal(sum(halves), sums)
    torch.testing.assert_close(sums, terms.sum(-1, keepdim=True), rtol=1e-9, atol=0)

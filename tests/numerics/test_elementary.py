"""Elementary functions against torch's, and on values alone or in a tensor."""

import math

import pytest
import torch

from mega_agentrl.numerics import elementary

WIDE = torch.linspace(-690, 690, 100_001, dtype=torch.float64)


def sine(x):
    return elementary.sin_cos(x)[0]


def cosine(x):
    return elementary.sin_cos(x)[1]


CASES = {
    "exp": (elementary.exp, torch.exp, WIDE),
    "log": (elementary.log, torch.log, torch.exp(WIDE)),
    "sin": (sine, torch.sin, WIDE * 300),
    "cos": (cosine, torch.cos, WIDE * 300),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_torchs_to_the_last_digits(name):
    function, expected, x = CASES[name]
    torch.testing.assert_close(function(x), expected(x), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_a_value_does_not_depend_on_its_place(name):
    function, _, x = CASES[name]
    x = x[::997]
    alone = torch.cat([function(x[index : index + 1]) for index in range(len(x))])
    assert torch.equal(alone, function(x))
    assert torch.equal(function(x[3:-2]), function(x)[3:-2])
    assert torch.equal(function(x[::2]), function(x)[::2])


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_nan(name):
    function, _, _ = CASES[name]
    assert function(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()


def test_exponents_are_clamped_and_the_logarithm_of_infinity_is_no_number():
    x = torch.tensor([-math.inf, -1e9, math.inf], dtype=torch.float64)
    assert elementary.exp(x).tolist() == pytest.approx([math.exp(-700)] * 2 + [math.exp(700)])
    assert elementary.log(x[2:]).isnan().all()

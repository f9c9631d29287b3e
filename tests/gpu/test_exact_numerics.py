"""The shared arithmetic gives the same bits on a GPU as on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mega_agentrl.numerics import elementary, layers
from mega_agentrl.numerics.exact_sums import FixedPointRows, exact_matmul, exact_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
NUM_QUERIES, NUM_KEYS, VOCABULARY = 37, 301, 50_257


@pytest.fixture
def random():
    """`random(*shape)`: normal numbers, other ones in each call."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float64, spread=1.0):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    return draw


def check_same_bits(function, *arguments):
    """Call the function with the arguments on both devices, and compare what it returns."""
    expected = function(*arguments)
    found = function(*(argument.to(DEVICE) for argument in arguments))
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for on_cpu, on_gpu in zip(expected, found, strict=True):
        assert on_cpu.dtype == on_gpu.dtype
        assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize(
    ("function", "spread"),
    [(elementary.exp, 100.0), (elementary.sin_cos, 1e5)],
    ids=["exp", "sin_cos"],
)
def test_elementary_functions_have_equal_bits(function, spread, random):
    check_same_bits(function, random(100_003, spread=spread))


def test_logarithms_of_all_magnitudes_have_equal_bits():
    check_same_bits(elementary.log, torch.logspace(-300, 300, 100_003, dtype=torch.float64))


def test_sums_have_equal_bits(random):
    check_same_bits(partial(exact_sum, num_terms=1 << 20), random(5, VOCABULARY).clamp(-1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 3000, 16_384])
def test_products_have_equal_bits(width, dtype, random):
    def product(left, right):
        return exact_matmul(left, FixedPointRows.from_rows(right), num_terms=width)

    check_same_bits(product, random(129, width, dtype=dtype), random(257, width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gate_and_rotation_have_equal_bits(dtype, random):
    hidden = random(65, 1024, dtype=dtype, spread=3.0)
    weight = random(1024, dtype=dtype)
    check_same_bits(partial(layers.rms_norm, eps=1e-6), hidden, weight)
    check_same_bits(layers.silu, hidden)
    angle = torch.linspace(0, 30_000, 65 * 32).view(65, 32)
    check_same_bits(partial(layers.rotate, factor=1.1), hidden.view(65, 16, 64), angle)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_equal_bits(dtype, random):
    query = random(2, 8, NUM_QUERIES, 64, dtype=dtype)
    key, value = (random(2, 2, NUM_KEYS, 64, dtype=dtype) for _ in range(2))
    visible = torch.ones(NUM_QUERIES, NUM_KEYS, dtype=torch.bool).tril(NUM_KEYS - NUM_QUERIES)
    check_same_bits(layers.attention, query, key, value, visible)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_and_entropies_have_equal_bits(dtype, random):
    logits_NV = random(7, VOCABULARY, dtype=dtype, spread=5.0)
    temperature_N = torch.linspace(0.3, 2.0, 7, dtype=torch.float64)
    check_same_bits(layers.log_probs_and_entropy, logits_NV, temperature_N)

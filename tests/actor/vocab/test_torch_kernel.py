from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega_agentrl.actor.vocab.torch_kernel import BLOCK_ROWS, _tile_shape, chunk_tokens
from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, VocabShard, logp_and_entropy
from tests.actor.vocab.vocab_cases import (
    CHECKS,
    Place,
    check_outputs,
    exact,
    given,
    hard_logits,
    run_exact,
)

HERE = Place(VocabKernel.torch)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_gives_the_outputs_and_gradients_of_float64(check):
    check(HERE)


def test_a_vocabulary_of_150000_tokens_keeps_the_accuracy():
    generator = torch.Generator().manual_seed(4)
    logits_NV = hard_logits(151_936, generator)
    target_N = torch.randint(0, 151_936, (len(logits_NV),), generator=generator)
    check_outputs(run_exact(HERE, logits_NV, target_N), exact(logits_NV, target_N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_rows", [1, 61, 75_968])
@pytest.mark.parametrize("num_bytes", [1, 100, 10_000, 16 << 20])
def test_two_tiles_fit_the_scratch(num_bytes, num_rows, dtype):
    size = 8 if dtype == torch.float64 else 4
    tokens, rows = _tile_shape(dtype, num_rows, num_bytes)
    assert 1 <= rows <= min(num_rows, BLOCK_ROWS)
    assert tokens == 1 or 2 * tokens * rows * size <= num_bytes
    # and are no smaller than they need to be
    assert 2 * (tokens + 1) * rows * size > num_bytes
    assert chunk_tokens(torch.empty(0, dtype=dtype), num_rows, num_bytes) == tokens


class Sizes(TorchDispatchMode):
    """Records the largest result of any operation, and all calls."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
            self.calls.append((str(func), tuple(result.shape)))
        return result


def test_no_tensor_of_all_tokens_and_rows_ever_exists():
    hidden, weight, target, grads = given(256, 1024, 8)
    shard = VocabShard(first_token_id=0, num_valid_rows=1024, group=None, scratch_bytes=16_000)
    hidden.requires_grad_(), weight.requires_grad_()
    with Sizes() as forward:
        outputs = logp_and_entropy(hidden, weight, target, 1.0, shard)
    with Sizes() as backward:
        torch.autograd.backward(outputs, list(grads))
    assert 0 < forward.largest <= 1024 * 8
    assert 0 < backward.largest <= 1024 * 8


def test_an_output_without_gradient_costs_nothing():
    hidden, weight, target, grads = given(16, 64, 8)
    shard = VocabShard(first_token_id=0, num_valid_rows=64, group=None)
    hidden.requires_grad_(), weight.requires_grad_()
    passes = []
    for wanted in (1, 2):
        outputs = logp_and_entropy(hidden, weight, target, 1.0, shard)
        with Sizes() as backward:
            torch.autograd.backward(outputs[:wanted], list(grads[:wanted]))
        passes.append([name for name, shape in backward.calls if shape == (16, 64)])
    # logits, minus the maximum, exp, scaled, target added
    assert len(passes[0]) - passes[0].count("aten.view.default") <= 6
    assert len(passes[0]) < len(passes[1])

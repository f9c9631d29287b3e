"""The vocabulary kernels on a GPU, also at their real size."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, VocabShard, logp_and_entropy
from tests.actor.vocab.vocab_cases import CHECKS, Place, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("kernel", [VocabKernel.torch, VocabKernel.triton])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_kernel_gives_the_outputs_and_gradients_of_float64(check, kernel):
    check(Place(kernel, device="cuda"))


def test_triton_is_the_choice_on_a_gpu_except_for_float64():
    from mega_agentrl.actor.vocab.vocab_parallel import _select_kernel

    shard = VocabShard(first_token_id=0, num_valid_rows=3, group=None)
    hidden_ND = torch.zeros(1, 4, device="cuda")
    assert _select_kernel(hidden_ND, shard).__name__.endswith("triton_kernel")
    assert _select_kernel(hidden_ND.double(), shard).__name__.endswith("torch_kernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_kernels_agree_at_full_size_within_bounded_memory(dtype):
    num_tokens, vocab, width = 3001, 151_936, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"device": "cuda", "generator": generator}
    hidden_ND = torch.randn(num_tokens, width, **make).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocab, width, **make) * 0.05).to(dtype).requires_grad_()
    target_N = torch.randint(0, vocab - 64, (num_tokens,), **make)
    found = []
    for kernel in (VocabKernel.torch, VocabKernel.triton):
        hidden_ND.grad = weight_VD.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shard = VocabShard(
            first_token_id=0,
            num_valid_rows=vocab - 64,
            group=None,
            kernel=kernel,
            scratch_bytes=64 << 20,
        )
        logp_N, entropy_N = logp_and_entropy(hidden_ND, weight_VD, target_N, 0.9, shard)
        (logp_N.mean() + 0.1 * entropy_N.mean()).backward()
        gradients = hidden_ND.grad.nbytes + weight_VD.grad.nbytes
        extra = torch.cuda.max_memory_allocated() - before - gradients
        assert extra < 0.5 * num_tokens * vocab * dtype.itemsize
        found.append([logp_N, entropy_N, hidden_ND.grad, weight_VD.grad])
    bounds = (2e-6, 2e-6, 1e-5, 1e-5) if dtype == torch.float32 else (2e-6, 2e-6, 2e-2, 2e-2)
    for left, right, bound in zip(*reversed(found), bounds, strict=True):
        close(left.detach(), right.detach().double(), bound)

"""The functions that run as compiled kernels on a GPU, against themselves without the compiler."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from mega_agentrl.actor import device, megatron_compat
from mega_agentrl.actor.model.layer_spec import rms_norm

LENGTHS = (5, 17, 40)
"""Tokens of the micro-batches."""
HEADS, WIDTH = 3, 16


def norm_inputs(num_tokens, dtype, target):
    """Return keys as Megatron splits them from queries and values, and the weight of their norm."""
    make = {"dtype": dtype, "device": target}
    mixed = torch.randn(num_tokens, 1, HEADS, 3 * WIDTH, **make)
    weight = torch.nn.Parameter(1 + torch.randn(WIDTH, **make) / 4)
    return mixed[..., WIDTH : 2 * WIDTH].requires_grad_(), weight


def rope_inputs(num_tokens, dtype, target):
    """Return queries and the angles of their positions."""
    query = torch.randn(num_tokens, 1, HEADS, WIDTH, dtype=dtype, device=target)
    angle = torch.randn(num_tokens, 1, 1, WIDTH, device=target) * 100
    return query.requires_grad_(), angle


def norm():
    return partial(rms_norm, eps=1e-6), norm_inputs


def rope():
    megatron_compat.init_device(0)
    from megatron.core.models.common.embeddings import rope_utils

    rotate = rope_utils._apply_rotary_pos_emb_bshd
    options = {"rotary_interleaved": False, "mla_rotary_interleaved": False, "mscale": 1.2}
    return partial(rotate, **options), rope_inputs


def values_and_gradients(function, inputs):
    """Return the result and the gradients of all inputs that have one."""
    inputs = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
    result = function(*inputs)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(result.shape, generator=generator).to(result)
    (result * upstream).sum().backward()
    return [result.detach(), *(value.grad for value in inputs if value.requires_grad)]


def check(compiled, plain, make_inputs, dtype, target, **tolerance):
    for number, length in enumerate(LENGTHS):
        torch.manual_seed(number)
        inputs = make_inputs(length, dtype, target)
        found = values_and_gradients(compiled, inputs)
        expected = values_and_gradients(plain, inputs)
        torch.testing.assert_close(found, expected, **tolerance)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), expected[0], **tolerance)


@pytest.mark.skipif(device.has_cuda(), reason="a GPU compiles them for itself")
@pytest.mark.extended
@pytest.mark.parametrize("case", [norm, rope])
def test_graphs_compute_the_same_and_fit_every_length(case):
    plain, make_inputs = case()
    assert not device.is_compiled(plain.func), "CPUs compute without the compiler"
    compiled = torch.compile(plain, backend="aot_eager", dynamic=True, fullgraph=True)
    counters.clear()
    check(compiled, plain, make_inputs, torch.bfloat16, "cpu", rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 2, "one graph with gradients and one without"


@pytest.mark.parametrize("case", [norm, rope], ids=["norm", "rope"])
def test_numbers_are_constants_of_the_graph(case, monkeypatch):
    """A number that is an input becomes a CPU tensor, for which torch starts a C++ compiler."""
    inputs_of_graphs = []

    def record(graph, inputs):
        inputs_of_graphs.extend(inputs)
        return graph.forward

    plain, make_inputs = case()
    with torch._dynamo.config.patch(specialize_float=False, recompile_limit=8):
        monkeypatch.setattr(device, "has_cuda", lambda: True)
        device.compile_on_gpu(lambda value: value)
        torch.compile(plain, backend=record, dynamic=True)(*make_inputs(5, torch.float32, "cpu"))
    tensors = [value for value in inputs_of_graphs if torch.is_tensor(value)]
    assert tensors and all(value.ndim > 0 for value in tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_cuda(), reason="no GPU")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("case", [norm, rope], ids=["norm", "rope"])
def test_kernels_of_a_gpu_compute_the_same(case, dtype, tolerance):
    compiled, make_inputs = case()
    assert device.is_compiled(compiled.func)
    plain = partial(compiled.func._torchdynamo_orig_callable, **compiled.keywords)
    check(compiled, plain, make_inputs, dtype, "cuda", rtol=tolerance, atol=tolerance)

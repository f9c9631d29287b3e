from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor import device
from mega_agentrl.config.enums import Dtype

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="redirections are for CPUs")


@on_cpu
def test_cuda_means_cpu_in_megatron_and_nowhere_else():
    device.init_device(0)
    from megatron.core.pipeline_parallel import schedules

    view = schedules.torch
    assert view.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert view.empty(2, device=view.cuda.current_device()).device.type == "cpu"
    assert view.ones(2, device="meta").device.type == "meta"
    view.cuda.synchronize()
    assert view.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@on_cpu
def test_the_view_keeps_lazy_attributes_and_is_made_once():
    device.init_device(0)
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel import schedules

    assert clip_grads.torch is schedules.torch
    assert clip_grads.torch.distributed is torch.distributed
    with pytest.raises(AttributeError):
        _ = clip_grads.torch.no_such_name


@on_cpu
def test_streams_are_one_that_is_always_idle():
    device.init_device(0)
    from megatron.core.transformer.moe import token_dispatcher

    cuda = token_dispatcher.torch.cuda
    stream = cuda.Stream()
    assert cuda.current_stream() is stream
    with cuda.stream(stream):
        stream.wait_stream(cuda.current_stream())
    stream.record_event().synchronize()


@on_cpu
def test_split_sizes_on_the_cpu_become_numpy_where_wanted():
    device.init_device(0)
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes = torch.tensor([3, 1])
    assert maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 1]
    assert not torch.is_tensor(maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    assert maybe_move_tensor_to_cpu(sizes) is sizes
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_nothing_random_is_asked_for():
    device.init_device(0)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        pass
    assert not get_cuda_rng_tracker().is_initialized()
    assert torch.equal(torch.get_rng_state(), before)


@on_cpu
def test_a_cpu_trains_over_gloo_without_optional_kernels():
    assert device.distributed_backend() == "gloo"
    assert device.current_device() == torch.device("cpu")
    assert not device.has_transformer_engine()
    assert not device.has_fused_grad_accumulation()
    assert set(device.describe_kernels().values()) == {"not in use"}


def test_the_dtype_is_the_chosen_one_and_by_default_that_of_the_device():
    assert device.resolve_train_dtype(Dtype.float32) == torch.float32
    assert device.resolve_train_dtype(Dtype.bfloat16) == torch.bfloat16
    default = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert device.resolve_train_dtype(Dtype.auto) == default

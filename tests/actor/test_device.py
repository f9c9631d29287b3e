from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="redirections are for CPUs")


def test_cuda_means_cpu_in_megatron_and_nowhere_else():
    device.choose_device(0)
    from megatron.core.pipeline_parallel import schedules

    view = schedules.torch
    assert view.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert view.empty(2, device=view.cuda.current_device()).device.type == "cpu"
    assert view.ones(2, device="meta").device.type == "meta"
    view.cuda.synchronize()
    assert view.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_the_view_keeps_lazy_attributes_and_is_made_once():
    device.choose_device(0)
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel import schedules

    assert clip_grads.torch is schedules.torch
    assert clip_grads.torch.distributed is torch.distributed
    with pytest.raises(AttributeError):
        _ = clip_grads.torch.no_such_name


def test_a_cpu_trains_in_float32_over_gloo():
    assert device.backend_name() == "gloo"
    assert device.train_dtype() == torch.float32
    assert device.device() == torch.device("cpu")

"""The device backend: what differs between GPUs with NCCL and CPUs with gloo.

Megatron-core writes `device="cuda"` and `torch.cuda.current_device()` into its code. On a
machine without CUDA the modules of it that this project runs get a view of torch in place of
the name `torch`: the same module, except that the device "cuda" means the CPU and the calls
that wait for a GPU return at once. Nothing outside those modules sees it, so it holds in every
thread and leaves torch itself alone. On a machine with CUDA nothing is touched.

Not covered: Megatron's random-state tracker (dropout is 0 and weights are always loaded), its
distributed optimizer and MoE.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = (
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.utils",
)
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def has_cuda() -> bool:
    """True where the actors run on GPUs."""
    return torch.cuda.is_available()


def backend_name() -> str:
    """Name of the torch.distributed backend."""
    return "nccl" if has_cuda() else "gloo"


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def train_dtype() -> torch.dtype:
    """Dtype of the weights in the forward pass; masters and gradients are float32."""
    return torch.bfloat16 if has_cuda() else torch.float32


def choose_device(local_rank: int) -> None:
    """Bind this process to its GPU, or send Megatron's CUDA calls to the CPU."""
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return
    view = _cpu_view()
    for name in _MODULES:
        importlib.import_module(name).torch = view


def _to_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _module_view(module: ModuleType, **changed: Any) -> ModuleType:
    """A module with the same attributes, lazy ones too, save for the changed ones."""
    view = ModuleType(module.__name__)
    view.__dict__.update(module.__dict__, **changed)
    view.__dict__["__getattr__"] = functools.partial(getattr, module)
    return view


@functools.cache
def _cpu_view() -> ModuleType:
    """torch with "cuda" meaning the CPU."""
    cuda = _module_view(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
    )
    factories = {name: _to_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _module_view(torch, cuda=cuda, **factories)

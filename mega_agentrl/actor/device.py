"""The device backend: what differs between GPUs with NCCL and CPUs with gloo.

Megatron-core writes `device="cuda"` and `torch.cuda.current_device()` into its code. On a
machine without CUDA the modules of it that this project runs get a view of torch in place of
the name `torch`: the same module, except that the device "cuda" means the CPU, the calls
that wait for a GPU return at once and streams are one stream that is always idle. Nothing
outside those modules sees it, so it holds in every thread and leaves torch itself alone. On a
machine with CUDA no name `torch` is touched.

On both, Megatron's random-state tracker is its own inert one: weights are always loaded and
dropout is 0, so nothing in the model is random.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from mega_agentrl.actor import uneven
from mega_agentrl.config.choices import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

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
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def has_cuda() -> bool:
    """True where the actors run on GPUs."""
    return torch.cuda.is_available()


@functools.cache
def has_transformer_engine() -> bool:
    """True where the layers are Transformer Engine's: it imports, and there is a GPU for it."""
    if not has_cuda():
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True


@functools.cache
def has_fused_gradients() -> bool:
    """True where Apex's kernel adds weight gradients straight into the float32 buffers."""
    return has_cuda() and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def describe() -> dict[str, str]:
    """Which optional kernels are in use: their version, or why not."""
    engine = has_transformer_engine()
    return {
        "transformer_engine": _version("transformer_engine") if engine else "not in use",
        # Megatron takes Transformer Engine's optimizer and clipping kernels before Apex's.
        "apex": "in use" if has_cuda() and _installed("amp_C") and not engine else "not in use",
        "fused_gradients": "in use" if has_fused_gradients() else "not in use",
        # Without Transformer Engine, attention is torch's own fused kernels.
        "flash_attn": _version("flash_attn") if engine else "not in use",
    }


def backend_name() -> str:
    """Name of the torch.distributed backend."""
    return "nccl" if has_cuda() else "gloo"


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def train_dtype(choice: Dtype) -> torch.dtype:
    """Dtype of the weights in the forward pass; masters and gradients are float32."""
    if choice is Dtype.auto:
        return torch.bfloat16 if has_cuda() else torch.float32
    return torch.bfloat16 if choice is Dtype.bfloat16 else torch.float32


def choose_device(local_rank: int) -> None:
    """Bind this process to its GPU, or send Megatron's CUDA calls to the CPU."""
    _complete_megatron()
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return
    view = _cpu_view()
    for name in _MODULES:
        importlib.import_module(name).torch = view
    distributed = _module_view(
        torch.distributed, all_gather=uneven.all_gather, reduce_scatter=uneven.reduce_scatter
    )
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings.torch = _module_view(view, distributed=distributed)
    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = _already_on_cpu


def _complete_megatron() -> None:
    """What Megatron's layers look up on any device, and only other parts of it would provide."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    state = importlib.import_module("megatron.core.parallel_state")
    if state._GLOBAL_MEMORY_BUFFER is None:
        # Scratch for gathered tokens; comes with its global groups, which are not used here.
        state._set_global_memory_buffer()
    experts = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, "te_general_gemm"):
        # Comes with Transformer Engine; the router asks whether it is None.
        experts.te_general_gemm = None
    router = importlib.import_module("megatron.core.transformer.moe.router")
    # No model here has such a bias; finding that out would start torch's compiler.
    router.TopKRouter._apply_expert_bias = lambda *_, **__: None


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str:
    return metadata.version(package) if _installed(package) else "not installed"


def _already_on_cpu(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's copy to the host, which leaves CPU tensors alone even where numpy is wanted."""
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


def cuda_type_names() -> AbstractContextManager[object]:
    """While active, in this thread: CPU tensors give their type by the name of the CUDA one.

    Megatron's optimizers sort parameters by `Tensor.type()` when they are made. With CUDA
    nothing changes.
    """
    return contextlib.nullcontext() if has_cuda() else _CudaTypeNames()


class _CudaTypeNames(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


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


class _IdleStream:
    """A CUDA stream, or an event on it, on a machine where nothing runs asynchronously."""

    def wait_stream(self, other: _IdleStream) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _IdleStream:
        """An event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


@functools.cache
def _cpu_view() -> ModuleType:
    """torch with "cuda" meaning the CPU."""
    stream = _IdleStream()
    cuda = _module_view(
        torch.cuda,
        Stream=lambda *_, **__: stream,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda *_: stream,
        empty_cache=lambda: None,
        stream=contextlib.nullcontext,
        synchronize=lambda *_: None,
    )
    factories = {name: _to_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _module_view(torch, cuda=cuda, **factories)

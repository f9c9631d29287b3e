"""Device backend: the differences between GPUs with NCCL and CPUs with gloo.

What Megatron itself needs to run on a CPU is in `megatron_compat`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any, cast

import torch

from mega_agentrl.config.enums import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

_TRANSFORMER_ENGINE = "transformer_engine"
transformer_engine_error = ""
"""Error of the import of Transformer Engine; empty if it is usable or not installed."""
_logger = logging.getLogger(__name__)


def has_cuda() -> bool:
    """Return whether the actors run on GPUs."""
    return torch.cuda.is_available()


def hide_unusable_transformer_engine() -> None:
    """Let Transformer Engine look missing if it is installed but cannot be used.

    Must be called before anything imports Megatron, which takes its optimizer even where there is
    no GPU, and handles a missing Transformer Engine but no other error of its import: the `OSError`
    of a missing CUDA library would end the rank. The error is logged and kept in
    `transformer_engine_error` for `kernels.describe_kernels`.
    """
    global transformer_engine_error
    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is None:
        return
    if has_cuda():
        modules_before = set(sys.modules)
        error = _import_error(
            f"{_TRANSFORMER_ENGINE}.pytorch", "megatron.core.extensions.transformer_engine"
        )
        if not error:
            return
        for name in set(sys.modules) - modules_before:
            if name.partition(".")[0] in (_TRANSFORMER_ENGINE, "megatron"):
                del sys.modules[name]
        transformer_engine_error = error
        _logger.warning("Transformer Engine is not used because its import failed: %s", error)
    sys.modules[_TRANSFORMER_ENGINE] = None  # type: ignore[assignment]  # imports raise ImportError


def _import_error(*modules: str) -> str:
    """Import the modules; return the first error, or an empty string."""
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  compiled packages raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine's layers are used: on a GPU, if it can be imported."""
    return importlib.util.find_spec(_TRANSFORMER_ENGINE) is not None


@functools.cache
def has_apex_grad_accumulation() -> bool:
    """Return whether Apex's kernel adds weight gradients to the float32 buffers."""
    return has_cuda() and not _import_error("fused_weight_gradient_mlp_cuda")


def compile_on_gpu[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile the function with `torch.compile` on a GPU; return it unchanged on a CPU.

    Megatron's `jit_fuser` compiles on every device. Here shapes are dynamic, so that one kernel
    serves micro-batches of any length, and bfloat16 values are rounded after the same operations as
    in the function itself.
    """
    if not has_cuda() or is_compiled(function):
        return function
    # Each combination of ndim, strides and gradient mode is compiled once; the default limit is 8.
    torch._dynamo.config.recompile_limit = 64
    # A number as a variable would be a tensor on the CPU, for whose kernel a C++ compiler would
    # run for most of a minute.
    torch._dynamo.config.specialize_float = True
    options = {"emulate_precision_casts": True}
    return cast("Function", torch.compile(function, dynamic=True, options=options))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether `compile_on_gpu` has compiled the function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def distributed_backend() -> str:
    """Return the name of the `torch.distributed` backend."""
    return "nccl" if has_cuda() else "gloo"


def current_device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def from_host(value: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Return a host tensor on a device, to which it is copied without waiting for the device.

    A copy from memory that is not pinned would wait until a GPU has done all work before it, and
    leave the GPU idle until more is launched.
    """
    if target.type != "cuda":
        return value.to(target)
    return value.pin_memory().to(target, non_blocking=True)


def resolve_train_dtype(choice: Dtype) -> torch.dtype:
    """Return the dtype of the model weights; master weights and gradients are float32."""
    dtype: torch.dtype = getattr(torch, choice.resolve(on_gpu=has_cuda()))
    return dtype


hide_unusable_transformer_engine()

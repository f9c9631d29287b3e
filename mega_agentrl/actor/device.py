"""Device backend: the differences between GPUs with NCCL and CPUs with gloo.

Megatron-core hardcodes `device="cuda"` and `torch.cuda.current_device()`. On a machine without
CUDA, `init_device` therefore replaces the name `torch` in the Megatron modules in use by a copy
of the module torch in which the device "cuda" is the CPU, calls that wait for a GPU return at
once, and all streams are one idle stream. torch itself and all other modules are unchanged.

With expert tensor parallelism over ranks that hold different tokens, Megatron gathers parts of
different lengths. NCCL's `all_gather` and `reduce_scatter` accept them, gloo's do not; on CPUs
they are replaced by one broadcast or reduction per part.

On both devices Megatron's random-state tracker is its inference tracker, which does nothing:
weights are always loaded and dropout is 0, so the model draws no random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from mega_agentrl.actor.matmul import matmul_accumulate
from mega_agentrl.config.enums import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_PATCHED_MODULES = (
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
_TRANSFORMER_ENGINE = "transformer_engine"
transformer_engine_error = ""
"""Error of the import of Transformer Engine; empty if it is usable or not installed."""
_logger = logging.getLogger(__name__)
_TENSOR_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def has_cuda() -> bool:
    """Return whether the actors run on GPUs."""
    return torch.cuda.is_available()


def hide_broken_transformer_engine() -> None:
    """Let Transformer Engine look missing if it is installed but cannot be imported.

    Must be called before anything imports Megatron, which handles a missing Transformer Engine but
    no other error of its import: the `OSError` of a missing CUDA library would end the rank. The
    error is logged and kept in `transformer_engine_error` for `kernels.describe_kernels`.
    """
    global transformer_engine_error
    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is None:
        return
    modules_before = set(sys.modules)
    error = _import_error(
        f"{_TRANSFORMER_ENGINE}.pytorch", "megatron.core.extensions.transformer_engine"
    )
    if not error:
        return
    for name in set(sys.modules) - modules_before:
        if name.partition(".")[0] in (_TRANSFORMER_ENGINE, "megatron"):
            del sys.modules[name]
    sys.modules[_TRANSFORMER_ENGINE] = None  # type: ignore[assignment]  # imports raise ImportError
    transformer_engine_error = error
    _logger.warning("Transformer Engine is not used because its import failed: %s", error)


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
    return has_cuda() and importlib.util.find_spec(_TRANSFORMER_ENGINE) is not None


@functools.cache
def has_apex_grad_accumulation() -> bool:
    """Return whether Apex's kernel adds weight gradients to the float32 buffers."""
    return has_cuda() and not _import_error("fused_weight_gradient_mlp_cuda")


_Function = TypeVar("_Function", bound="Callable[..., Any]")


def compile_on_gpu(function: _Function) -> _Function:
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
    return cast("_Function", torch.compile(function, dynamic=True, options=options))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether `compile_on_gpu` has compiled the function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def distributed_backend() -> str:
    """Return the name of the `torch.distributed` backend."""
    return "nccl" if has_cuda() else "gloo"


def current_device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def resolve_train_dtype(choice: Dtype) -> torch.dtype:
    """Return the dtype of the model weights; master weights and gradients are float32."""
    dtype: torch.dtype = getattr(torch, choice.resolve(on_gpu=has_cuda()))
    return dtype


def init_device(local_rank: int) -> None:
    """Bind this process to its GPU, or redirect Megatron's CUDA calls to the CPU."""
    _set_megatron_defaults()
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return
    cpu_torch = _cpu_torch_view()
    for name in _PATCHED_MODULES:
        importlib.import_module(name).torch = cpu_torch
    distributed = _module_view(
        dist,
        all_gather=all_gather_uneven,
        reduce_scatter=reduce_scatter_uneven,
    )
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # Recomputation saves and restores the state of CUDA's generator, which a CPU does not have.
    random._get_cuda_rng_state = lambda **_: None
    random._set_cuda_rng_state = lambda *_, **__: None
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings.torch = _module_view(cpu_torch, distributed=distributed)
    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = _maybe_move_tensor_to_cpu


def all_gather_uneven(
    parts: list[torch.Tensor], local: torch.Tensor, *, group: dist.ProcessGroup
) -> None:
    """Gather the tensors of all ranks of the group, which may differ in length.

    Args:
        parts: One tensor per rank of the group, in the shape of that rank's `local`; overwritten.
        local: This rank's tensor.
        group: The group to gather from.
    """
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(local)
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)


def reduce_scatter_uneven(
    local: torch.Tensor, parts: list[torch.Tensor], *, group: dist.ProcessGroup
) -> None:
    """Sum tensors over the group and scatter the sums, which may differ in length.

    Args:
        local: Overwritten with the sum over all ranks of their part for this rank.
        parts: This rank's summand for each rank of the group; unchanged.
        group: The group to sum over.
    """
    for rank, part in enumerate(parts):
        if not part.numel():
            continue
        total = part.clone()
        dist.reduce(total, group=group, group_dst=rank)
        if rank == group.rank():
            local.copy_(total)


def _set_megatron_defaults() -> None:
    """Set global state that Megatron's own start-up sets, and its replaceable kernels."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Scratch for gathered tokens; normally created with Megatron's global process groups.
        parallel_state._set_global_memory_buffer()
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron defines the name only with Transformer Engine, but always compares it to None.
        moe_utils.te_general_gemm = None
    router = importlib.import_module("megatron.core.transformer.moe.router")
    # No supported model has an expert bias, and the original would start torch's compiler.
    router.TopKRouter._apply_expert_bias = lambda *_, **__: None
    rope_utils = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    rope_utils._apply_rotary_pos_emb_bshd = compile_on_gpu(rope_utils._apply_rotary_pos_emb_bshd)
    if not has_apex_grad_accumulation():
        layers = importlib.import_module("megatron.core.tensor_parallel.layers")
        layers.fused_weight_gradient_mlp_cuda = _GradAccumulation
        layers._grad_accum_fusion_available = True


class _GradAccumulation:
    """Stands in for Apex's module `fused_weight_gradient_mlp_cuda`, with torch's product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_ND: torch.Tensor, grad_NE: torch.Tensor, buffer_ED: torch.Tensor
    ) -> None:
        """Add the gradient of a linear layer's `[E, D]` weight to its float32 buffer."""
        matmul_accumulate(buffer_ED, grad_NE.t(), input_ND)


def _maybe_move_tensor_to_cpu(
    value: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Replace Megatron's function of this name, which ignores `as_numpy` for CPU tensors."""
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


def report_cuda_tensor_types() -> AbstractContextManager[object]:
    """Make CPU tensors report the type name of CUDA tensors, in this thread.

    Megatron's optimizers group parameters by `Tensor.type()` when they are built, and accept
    CUDA types only. With CUDA this does nothing.
    """
    return contextlib.nullcontext() if has_cuda() else _ReportCudaTensorTypes()


class _ReportCudaTensorTypes(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _redirect_to_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _module_view(module: ModuleType, **changed: Any) -> ModuleType:
    """Return a copy of a module with some attributes replaced; lazy attributes still work."""
    view = ModuleType(module.__name__)
    view.__dict__.update(module.__dict__, **changed)
    view.__dict__["__getattr__"] = functools.partial(getattr, module)
    return view


class _NoOpStream:
    """Stands in for CUDA streams and events where nothing runs asynchronously."""

    def wait_stream(self, other: _NoOpStream) -> None:
        """Return at once."""

    def record_event(self) -> _NoOpStream:
        """Return an event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


@functools.cache
def _cpu_torch_view() -> ModuleType:
    """Return a view of torch in which the device "cuda" is the CPU."""
    stream = _NoOpStream()
    cuda = _module_view(
        torch.cuda,
        Stream=lambda *_, **__: stream,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda *_: stream,
        empty_cache=lambda: None,
        stream=contextlib.nullcontext,
        synchronize=lambda *_: None,
    )
    factories = {name: _redirect_to_cpu(getattr(torch, name)) for name in _TENSOR_FACTORIES}
    return _module_view(torch, cuda=cuda, **factories)


hide_broken_transformer_engine()

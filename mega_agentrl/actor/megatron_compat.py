"""Private names of Megatron-core, and what is changed in it in this process.

No other module uses or changes what Megatron does not publish. Checked with megatron-core 0.19.2.
Each change says why it is made, and after "Until" when it can go.

Megatron hardcodes `device="cuda"` and `torch.cuda.current_device()`. On a machine without CUDA,
`init_device` therefore replaces the name `torch` in the Megatron modules in use by a copy of the
module torch in which the device "cuda" is the CPU, calls that wait for a GPU return at once, and
all streams are one idle stream. torch itself and all other modules are unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys as replace_keys_with_sharded_keys,
)
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer import attention
from megatron.core.transformer.moe import moe_utils, router, token_dispatcher
from torch.overrides import TorchFunctionMode

from mega_agentrl.actor import device
from mega_agentrl.actor.matmul import matmul_accumulate
from mega_agentrl.types.activity import WAIT_OVERDUE_S, track_activity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["replace_keys_with_sharded_keys"]

_MODULES_WITH_CUDA = (
    distributed_data_parallel,
    param_and_grad_buffer,
    rotary_pos_embedding,
    clip_grads,
    optimizer,
    p2p_communication,
    schedules,
    layers,
    mappings,
    moe_utils,
    router,
    token_dispatcher,
    utils,
)
_TENSOR_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class TrackedP2PCommunicator(p2p_communication.P2PCommunicator):
    """Megatron's communicator between pipeline stages, which reports the ranks it waits for.

    Until Megatron's communicator has a public method that all of its transfers go through.
    """

    def _communicate(self, **kwargs: Any) -> Any:
        # Whether this rank receives from and sends to each neighbour.
        directions = {
            f"rank {self.prev_rank}": (kwargs["recv_prev"], kwargs["tensor_send_prev"] is not None),
            f"rank {self.next_rank}": (kwargs["recv_next"], kwargs["tensor_send_next"] is not None),
        }
        peers = [peer for peer, transfers in directions.items() if any(transfers)]
        receives = any(receive for receive, _ in directions.values())
        sends = any(send for _, send in directions.values())
        verb = "/".join(["send"] * sends + ["receive"] * receives)
        with track_activity(
            f"micro-batch {verb}", " and ".join(peers), overdue_after_s=WAIT_OVERDUE_S
        ):
            return super()._communicate(**kwargs)


def first_element(distributed: DistributedOptimizer, parameter: torch.Tensor) -> int:
    """Return the first element of a flat parameter that this rank's optimizer holds.

    Until Megatron's distributed optimizer has a public method for it.
    """
    ranges = DistributedOptimizer._get_model_param_range_map(distributed, parameter)
    start: int = ranges["param"].start
    return start


def is_rotation_compiled() -> bool:
    """Return whether queries and keys are rotated by a compiled kernel.

    Until `_compile_rotation` is gone.
    """
    return device.is_compiled(rope_utils._apply_rotary_pos_emb_bshd)


def replace_rotation(rotate: Callable[..., torch.Tensor]) -> None:
    """Replace the function with which all attention layers rotate queries and keys.

    Until the spec of an attention layer names the function.
    """
    attention.apply_rotary_pos_emb = rotate


def init_device(local_rank: int) -> None:
    """Bind this process to its GPU, or redirect Megatron's CUDA calls to the CPU."""
    _use_no_random_numbers()
    _create_scratch_memory()
    _skip_expert_bias()
    _compile_rotation()
    _accumulate_weight_gradients()
    if device.has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return
    cpu_torch = _cpu_torch_view()
    for module in _MODULES_WITH_CUDA:
        module.torch = cpu_torch
    _accept_uneven_parts(cpu_torch)
    _save_no_cuda_random_state()
    _keep_split_sizes_as_numpy()


def _use_no_random_numbers() -> None:
    """Use Megatron's random-state tracker for inference, which does nothing.

    Weights are loaded and dropout is 0, so that the model draws no random numbers. Until Megatron
    builds layers without a tracker that its own start-up has made.
    """
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def _create_scratch_memory() -> None:
    """Create the scratch memory for gathered tokens.

    Megatron creates it with its global process groups, which are not used here. Until the buffer
    does not belong to `parallel_state`.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _skip_expert_bias() -> None:
    """Leave out the router's step for expert biases, which no supported model has.

    The original would start torch's compiler in the first pass. Until it is not compiled where it
    does nothing.
    """
    router.TopKRouter._apply_expert_bias = lambda *_, **__: None


def _compile_rotation() -> None:
    """Compile the unfused rotation of queries and keys on a GPU.

    The fused one ignores the attention factor of yarn. Until it does not.
    """
    rope_utils._apply_rotary_pos_emb_bshd = device.compile_on_gpu(
        rope_utils._apply_rotary_pos_emb_bshd
    )


def _accumulate_weight_gradients() -> None:
    """Let linear layers add weight gradients to the float32 buffers without Apex.

    Until Megatron's local layers do so with torch.
    """
    if not device.has_apex_grad_accumulation():
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


def _accept_uneven_parts(cpu_torch: ModuleType) -> None:
    """Replace gloo's collectives where Megatron gathers parts of different lengths.

    With expert tensor parallelism over ranks that hold different tokens it does. NCCL's
    `all_gather` and `reduce_scatter` accept them, gloo's do not. Until gloo's do.
    """
    distributed = _module_view(
        dist, all_gather=all_gather_uneven, reduce_scatter=reduce_scatter_uneven
    )
    mappings.torch = _module_view(cpu_torch, distributed=distributed)


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


def _save_no_cuda_random_state() -> None:
    """Let recomputation save and restore no state of CUDA's generator, which a CPU does not have.

    Until Megatron's recomputation runs without CUDA.
    """
    random._get_cuda_rng_state = lambda **_: None
    random._set_cuda_rng_state = lambda *_, **__: None


def _keep_split_sizes_as_numpy() -> None:
    """Replace `maybe_move_tensor_to_cpu`, which ignores `as_numpy` for CPU tensors.

    `all_to_all_single` refuses tensors as split sizes. Until it is not ignored.
    """
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = _maybe_move_tensor_to_cpu


def _maybe_move_tensor_to_cpu(
    value: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


def report_cuda_tensor_types() -> AbstractContextManager[object]:
    """Make CPU tensors report the type name of CUDA tensors, in this thread.

    Megatron's optimizers group parameters by `Tensor.type()` when they are built, and accept
    CUDA types only. With CUDA this does nothing. Until they accept others.
    """
    return contextlib.nullcontext() if device.has_cuda() else _ReportCudaTensorTypes()


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

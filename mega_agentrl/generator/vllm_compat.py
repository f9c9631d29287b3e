"""Private names of vLLM, and what is changed in it in this process.

No other module uses or changes what vLLM does not publish. Checked with vLLM 0.32.0. Each function
says why it is needed, and after "Until" when it can go. It imports vLLM's modules itself, because
vLLM loads the plugin, and with it this module, while its own modules are being imported.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_TENSOR_GROUPS = ("_TP", "_EP")
_SINGLE_GROUPS = ("_PP", "_DP", "_PCP", "_DCP")


def pack_loaded_module(module: torch.nn.Module) -> None:
    """Pack a module whose weights were written, as vLLM does after its own loader's last tensor.

    Until vLLM's layerwise reload can be told that a module is complete.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _layerwise_process,
        get_layerwise_info,
    )

    info = get_layerwise_info(module)
    info.load_numel = info.load_numel_total or 0
    _layerwise_process(module, info)


@contextmanager
def replaced_groups(tensor_group: Any, single_group: Any) -> Iterator[None]:
    """Replace the module-level groups from which layers read their rank and size.

    Until vLLM's layers get their groups as arguments.

    Args:
        tensor_group: Takes the place of the groups of tensor ranks.
        single_group: Takes the place of all other groups.
    """
    from vllm.distributed import parallel_state

    replacements = dict.fromkeys(_TENSOR_GROUPS, tensor_group)
    replacements |= dict.fromkeys(_SINGLE_GROUPS, single_group)
    real_groups = {name: getattr(parallel_state, name) for name in replacements}
    vars(parallel_state).update(replacements)
    try:
        yield
    finally:
        vars(parallel_state).update(real_groups)


def accept_v1_runner() -> None:
    """Let vLLM start on a CPU with experts returned, in this process.

    What vLLM would refuse there is the V1 runner, and runs without a cache of prefixes, in which
    `route_capture` returns the experts of each step. The rest of its checks is about layouts of
    engines that this package does not start. Until the V2 runner runs on CPUs.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = lambda _: None


def step_output(output: Any) -> Any:
    """Return the output of a step, which asynchronous scheduling puts inside of another.

    Until the V2 runner runs on CPUs.
    """
    return getattr(output, "_model_runner_output", output)


def replace_operations(
    *,
    linear: Callable[..., Any],
    process_weights: Callable[..., Any],
    row_parallel: Callable[..., Any],
    norm: Callable[..., Any],
    activation: Callable[..., Any],
    rotation: Callable[..., Any],
    store_keys_and_values: Callable[..., Any],
    attention: Callable[..., Any],
    log_probs: Callable[..., Any],
) -> None:
    """Replace the operations of dense text models on a CPU, in models that are built later.

    Each function takes the arguments of the method that it replaces. Until vLLM takes custom
    operations for all of them from a plugin.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.sample.sampler import Sampler

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = process_weights
        method.apply = linear
    RowParallelLinear.forward = row_parallel
    RMSNorm.forward = norm
    SiluAndMul.forward = activation
    RotaryEmbeddingBase.forward = rotation
    CPUAttentionBackendImpl.do_kv_cache_update = store_keys_and_values
    CPUAttentionBackendImpl.forward = attention
    Sampler.compute_logprobs = staticmethod(log_probs)

"""Description of the kernels that a built model computes with.

The names are read from the built modules, the optimizer and the functions that choose a kernel
during a pass, not from the configuration, so that a fallback to another kernel is visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.actor import device
from mega_agentrl.actor.megatron_compat import is_rotation_compiled
from mega_agentrl.actor.model.grouped_experts import GroupedExperts, supports_grouped_mm
from mega_agentrl.actor.model.layer_spec import RMSNorm, rms_norm
from mega_agentrl.actor.model.packed_attention import PackedAttention, supports_varlen_attention
from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, default_kernel
from mega_agentrl.config.enums import TreeAttention
from mega_agentrl.reshard.mapping.model_shape import HeadKind

if TYPE_CHECKING:
    import torch

    from mega_agentrl.actor.megatron_model import MegatronModel

_TRANSFORMER_ENGINE = "Transformer Engine"
_LIBRARIES = {"torch": "torch", "apex": "Apex", "transformer_engine": _TRANSFORMER_ENGINE}
_VOCAB_KERNELS = {VocabKernel.torch: "torch", VocabKernel.triton: "Triton"}


def describe_kernels(model: MegatronModel) -> str:
    """Return a line such as `attention torch varlen, norm torch, optimizer torch AdamW, ...`.

    If Transformer Engine is installed but cannot be imported, the line ends with the error.
    """
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    kernels = {
        "attention": _attention_kernel(model, modules),
        "norm": _compilation(is_compiled=device.is_compiled(rms_norm))
        if _has_module(modules, RMSNorm)
        else _TRANSFORMER_ENGINE,
        "rope": _compilation(is_compiled=is_rotation_compiled()),
        "optimizer": _optimizer_kernel(model),
        "gradients of weights": _accumulation_kernel(model),
        "experts": _expert_kernel(model, modules),
        "vocabulary head": _head_kernel(model),
    }
    if model.is_exact:
        kernels |= dict.fromkeys(("attention", "norm", "rope", "vocabulary head"), "exact")
    line = ", ".join(f"{part} {kernel}" for part, kernel in kernels.items() if kernel)
    error = device.transformer_engine_error
    return f"{line} ({_TRANSFORMER_ENGINE} cannot be imported: {error})" if error else line


def _compilation(*, is_compiled: bool) -> str:
    return "torch compiled" if is_compiled else "torch"


def _has_module(modules: list[torch.nn.Module], module_class: type) -> bool:
    return any(isinstance(module, module_class) for module in modules)


def _attention_kernel(model: MegatronModel, modules: list[torch.nn.Module]) -> str:
    target_device, head_dim = device.current_device(), model.shape.head_dim
    tree_kernels = {getattr(module, "tree_attention", None) for module in modules}
    is_triton = TreeAttention.triton in tree_kernels
    if not _has_module(modules, PackedAttention):
        return f"{_TRANSFORMER_ENGINE} (Triton for forks)" if is_triton else _TRANSFORMER_ENGINE
    if is_triton:
        return "Triton"
    if supports_varlen_attention(target_device, model.dtype, head_dim):
        return "torch varlen"
    return "torch padded blocks"


def _optimizer_kernel(model: MegatronModel) -> str:
    """Return library and class of Adam, or an empty string for frozen weights."""
    if not model.is_trainable:
        return ""
    adam_class = model.optimizer.adam_class
    library = adam_class.__module__.partition(".")[0]
    return f"{_LIBRARIES.get(library, library)} {adam_class.__name__}"


def _accumulation_kernel(model: MegatronModel) -> str:
    """Return what adds gradients to the float32 buffers, or an empty string for frozen weights."""
    if not model.is_trainable:
        return ""
    if device.has_transformer_engine():
        return _TRANSFORMER_ENGINE
    return "Apex" if device.has_apex_grad_accumulation() else "torch addmm"


def _expert_kernel(model: MegatronModel, modules: list[torch.nn.Module]) -> str:
    """Return the kernel of the experts, or an empty string for a dense model."""
    from megatron.core.transformer.moe.moe_layer import MoELayer  # `device` must be imported first

    if not _has_module(modules, MoELayer):
        return ""
    if not _has_module(modules, GroupedExperts):
        return f"{_TRANSFORMER_ENGINE} grouped"
    is_grouped = supports_grouped_mm(device.current_device(), model.dtype)
    return "torch grouped_mm" if is_grouped else "torch one after another"


def _head_kernel(model: MegatronModel) -> str:
    """Return the kernel of log-probs and entropies, or an empty string for a scalar head."""
    if model.shape.head is HeadKind.scalar:
        return ""
    return _VOCAB_KERNELS[default_kernel(device.current_device(), model.dtype)]

"""Layer specs: the modules that Megatron builds a decoder from.

These are Transformer Engine's layers, or Megatron's local layers with this package's norm and
attention. Biases follow the model family: Megatron's `add_bias_linear` would add one to
every linear layer, so it stays off, and the linear layers that have a bias are replaced here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.actor.model.exact_layers import (
    ExactColumnParallelLinear,
    ExactRowParallelLinear,
    exact_value,
)
from mega_agentrl.actor.model.grouped_experts import GroupedExperts
from mega_agentrl.actor.model.packed_attention import ExactPackedAttention, PackedAttention
from mega_agentrl.actor.model.vision_tower import DeepStackLayer
from mega_agentrl.numerics import layers as exact_layers

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mega_agentrl.reshard.mapping.model_shape import ModelShape
    from mega_agentrl.reshard.mapping.partition import ModelParallelRank


@device.compile_on_gpu
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `[..., hidden_size]` by the root mean square, with Hugging Face's rounding.

        y = weight * round(x / sqrt(mean(x^2) + eps))

    Mean and division are in float32; the quotient is rounded to the input's dtype before it is
    multiplied by the weight `[hidden_size]`.
    """
    return weight * functional.rms_norm(hidden, weight.shape, eps=eps)


class RMSNorm(torch.nn.Module):
    """`rms_norm` for Megatron's local layers, with an uninitialised weight `[hidden_size]`.

    Megatron's wrapper of torch's norm refuses sequence parallelism and Apex's norm has no RMS
    variant; this one works on any subset of the tokens. The weight's gradient is then a partial
    sum, which `gpt_model.set_grad_sync_flags` makes Megatron add up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=device.current_device())
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., hidden_size]`; shape and dtype stay the same."""
        return rms_norm(hidden, self.weight, self.eps)


class ExactRMSNorm(RMSNorm):
    """`RMSNorm` with the value of `numerics`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., hidden_size]`; shape and dtype stay the same."""
        return exact_value(
            lambda: rms_norm(hidden, self.weight, self.eps),
            lambda: exact_layers.rms_norm(hidden, self.weight, self.eps),
        )


def decoder_block_spec(
    shape: ModelShape, mp_rank: ModelParallelRank, chunk: int, *, exact: bool = False
) -> TransformerBlockSubmodules:
    """Return the spec of one virtual chunk: its dense or MoE layers and the final norm.

    With `exact` the layers are those of `exact_layers`, for a dense model without Transformer
    Engine.
    """
    norm: type = ExactRMSNorm if exact else RMSNorm
    build = partial(_local_layer_spec, exact=exact)
    if device.has_transformer_engine():
        norm, build = _te_norm(), _te_layer_spec
    layers = mp_rank.layers(chunk, shape.num_layers)
    specs = [build(shape, sparse=shape.is_moe_layer(layer)) for layer in layers]
    num_deepstack = len(shape.vision.deepstack_blocks) if shape.vision else 0
    for layer, spec in zip(layers, specs, strict=True):
        if layer < num_deepstack:
            spec.module = DeepStackLayer
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _local_layer_spec(shape: ModelShape, *, sparse: bool, exact: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=_num_experts(shape, sparse),
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    norm = ExactRMSNorm if exact else RMSNorm
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.core_attention = ExactPackedAttention if exact else PackedAttention
    # Megatron builds an MLP or a layer of experts from a `functools.partial` with its submodules.
    mlp = layer.mlp.keywords["submodules"]
    if exact:
        attention.linear_qkv = mlp.linear_fc1 = ExactColumnParallelLinear
        attention.linear_proj = mlp.linear_fc2 = ExactRowParallelLinear
    if sparse:
        mlp.experts = partial(GroupedExperts, **mlp.experts.keywords)
    return _customize_layer_spec(spec, shape, sparse)


def _te_layer_spec(shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    # Imported here because it needs Transformer Engine.
    from mega_agentrl.actor.model.te_attention import PackedTEAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=_num_experts(shape, sparse),
        moe_grouped_gemm=True,
        qk_layernorm=shape.qk_norm,
    )
    spec.submodules.self_attention.submodules.core_attention = PackedTEAttention
    return _customize_layer_spec(spec, shape, sparse)


def _te_norm() -> type:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _num_experts(shape: ModelShape, sparse: bool) -> int | None:
    return shape.moe.num_experts if shape.moe and sparse else None


def _customize_layer_spec(spec: ModuleSpec, shape: ModelShape, sparse: bool) -> ModuleSpec:
    """Set the biases, for local and Transformer Engine layers alike."""
    attention = spec.submodules.self_attention.submodules
    mlp = spec.submodules.mlp.keywords["submodules"]
    if shape.o_proj_bias:
        attention.linear_proj = linear_with_bias(attention.linear_proj)
    if shape.mlp_bias and not sparse:
        mlp.linear_fc1 = linear_with_bias(mlp.linear_fc1)
        # Megatron's layer would return the bias apart from the product. If the MLP is recomputed,
        # autograd would then take the bias for the result of an operation, not for a parameter.
        mlp.linear_fc2 = linear_with_bias(mlp.linear_fc2, skip_bias_add=False)
    return spec


def linear_with_bias(linear: type, **options: bool) -> type:
    """Return a subclass of a Megatron linear layer that always has a bias and these options."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, *args, **{**kwargs, **options, "bias": True})

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})

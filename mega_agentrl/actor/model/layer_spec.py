"""Layer specs: the modules that Megatron builds a decoder from.

These are Transformer Engine's layers, or Megatron's local layers with this package's norm and
attention. Biases follow the model family: Megatron's single switch would add one to every
linear layer, so it stays off, and the linear layers that have a bias are replaced here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mega_agentrl.actor import device
from mega_agentrl.actor.model.gathered_kv_attention import GatheredKVAttention
from mega_agentrl.actor.model.packed_attention import PackedAttention
from mega_agentrl.actor.model.rms_norm import RMSNorm

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank
    from mega_agentrl.reshard.mapping.model_shape import ModelShape


def decoder_block_spec(
    shape: ModelShape, mp_rank: ModelParallelRank, chunk: int
) -> TransformerBlockSubmodules:
    """Return the spec of one virtual chunk: its dense or MoE layers and the final norm."""
    count = shape.num_layers // (mp_rank.pipeline_size * mp_rank.virtual_size)
    first = (chunk * mp_rank.pipeline_size + mp_rank.pipeline_rank) * count
    build = _te_layer_spec if device.has_transformer_engine() else _local_layer_spec
    return TransformerBlockSubmodules(
        layer_specs=[
            build(shape, sparse=shape.is_moe_layer(layer)) for layer in range(first, first + count)
        ],
        layer_norm=_te_norm() if device.has_transformer_engine() else RMSNorm,
    )


def _local_layer_spec(shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=_num_experts(shape, sparse),
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    return _customize_layer_spec(spec, shape, sparse)


def _te_layer_spec(shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    # Needs Transformer Engine.
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
    """Set the attention module and the biases, for local and Transformer Engine layers alike."""
    spec.submodules.self_attention.module = GatheredKVAttention
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    if shape.o_proj_bias:
        attention.linear_proj = linear_with_bias(attention.linear_proj)
    if shape.mlp_bias and not sparse:
        mlp.linear_fc1, mlp.linear_fc2 = (
            linear_with_bias(mlp.linear_fc1),
            linear_with_bias(mlp.linear_fc2),
        )
    return spec


def linear_with_bias(linear: type) -> type:
    """Return a subclass of a Megatron linear layer that always has a bias."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, *args, **{**kwargs, "bias": True})

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})

"""Which modules Megatron builds a decoder from: its own with our norm and attention, or
Transformer Engine's.

Biases stand where the family has them: Megatron's one switch would put them on every linear of
the layer, so it stays off and the linears that have one are named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mega_agentrl.actor import device
from mega_agentrl.actor.attention import PackedAttention
from mega_agentrl.actor.norm import RmsNorm
from mega_agentrl.actor.shared_kv import SharedKvAttention

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.place import Place


def decoder_spec(shape: ModelShape, place: Place, chunk: int) -> TransformerBlockSubmodules:
    """The layers of one chunk of a rank, dense or sparse one by one, and the last norm."""
    count = shape.num_layers // (place.pipeline_size * place.virtual_size)
    first = (chunk * place.pipeline_size + place.pipeline_rank) * count
    build = _engine_layer if device.has_transformer_engine() else _local_layer
    return TransformerBlockSubmodules(
        layer_specs=[
            build(shape, sparse=shape.is_sparse(layer)) for layer in range(first, first + count)
        ],
        layer_norm=_engine_norm() if device.has_transformer_engine() else RmsNorm,
    )


def _local_layer(shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=_num_experts(shape, sparse),
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    attention.core_attention = PackedAttention
    return _finish(spec, shape, sparse)


def _engine_layer(shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    # Importable only where Transformer Engine is.
    from mega_agentrl.actor.te_attention import PackedEngineAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=_num_experts(shape, sparse),
        moe_grouped_gemm=True,
        qk_layernorm=shape.qk_norm,
    )
    spec.submodules.self_attention.submodules.core_attention = PackedEngineAttention
    return _finish(spec, shape, sparse)


def _engine_norm() -> type:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _num_experts(shape: ModelShape, sparse: bool) -> int | None:
    return shape.moe.num_experts if shape.moe and sparse else None


def _finish(spec: ModuleSpec, shape: ModelShape, sparse: bool) -> ModuleSpec:
    """What both kinds of layer share: keys over many tensor ranks, and the biases."""
    spec.submodules.self_attention.module = SharedKvAttention
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    if shape.out_bias:
        attention.linear_proj = with_bias(attention.linear_proj)
    if shape.mlp_bias and not sparse:
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)
    return spec


def with_bias(linear: type) -> type:
    """A linear class of Megatron's that has a bias whatever the configuration says."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, *args, **{**kwargs, "bias": True})

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})

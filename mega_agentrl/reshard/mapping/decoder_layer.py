"""One decoder layer of Megatron's `GPTModel` as blocks of Hugging Face tensors.

    linear_qkv   rows grouped by key/value head: [queries of the group, key, value] each. The rows
                 of all groups are divided evenly over tensor ranks. With more tensor ranks than
                 key/value heads a boundary falls inside a group (Megatron gathers the activations
                 again), so no row is held twice.
    linear_fc1   the rank's rows of gate_proj followed by its rows of up_proj
    linear_proj, linear_fc2   sharded by columns; their biases are replicated
    experts      contiguous per expert rank; each is sharded like fc1 and fc2, over the
                 expert-tensor ranks
    norms, router   replicated

With Transformer Engine (`fused`) a linear layer contains the norm before it, and one module
contains all experts of a rank. This changes the names but not the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.reshard.mapping.partition import RowRange, replicate, slice_columns, stack_rows

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.mapping.model_shape import ModelShape
    from mega_agentrl.reshard.mapping.partition import ModelParallelRank


def layer_hf_shapes(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every Hugging Face tensor of a layer, in model order."""
    hidden = shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = (
        _linear_shapes("self_attn.q_proj", query, hidden, bias=shape.qkv_bias)
        | _linear_shapes("self_attn.k_proj", key, hidden, bias=shape.qkv_bias)
        | _linear_shapes("self_attn.v_proj", key, hidden, bias=shape.qkv_bias)
        | _linear_shapes("self_attn.o_proj", hidden, query, bias=shape.o_proj_bias)
    )
    if shape.qk_norm:
        shapes |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (shape.head_dim,)
        )
    mlps = {"mlp.": shape.ffn_hidden_size}
    if shape.moe and shape.is_moe_layer(layer):
        shapes |= _linear_shapes("mlp.gate", shape.moe.num_experts, hidden, bias=False)
        experts = range(shape.moe.num_experts)
        mlps = {f"mlp.experts.{expert}.": shape.moe.ffn_hidden_size for expert in experts}
    for mlp, ffn in mlps.items():
        shapes |= (
            _linear_shapes(f"{mlp}gate_proj", ffn, hidden, bias=shape.mlp_bias)
            | _linear_shapes(f"{mlp}up_proj", ffn, hidden, bias=shape.mlp_bias)
            | _linear_shapes(f"{mlp}down_proj", hidden, ffn, bias=shape.mlp_bias)
        )
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    prefix = f"{shape.family.hf_decoder_prefix}layers.{layer}."
    return {f"{prefix}{name}": full_shape for name, full_shape in shapes.items()}


def _linear_shapes(name: str, rows: int, width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, width)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})


def layer_shards(
    shape: ModelShape,
    parallel_rank: ModelParallelRank,
    layer: int,
    megatron_prefix: str,
    *,
    fused: bool,
) -> Iterator[ShardLayout]:
    """Yield the parameters of one layer on one rank, in model order.

    Args:
        shape: The model.
        parallel_rank: The rank.
        layer: Layer index in the whole model.
        megatron_prefix: Prefix of the Megatron names, such as `decoder.layers.0.`.
        fused: Use the names of Transformer Engine's layers.
    """
    hf_prefix = f"{shape.family.hf_decoder_prefix}layers.{layer}."
    is_moe = shape.is_moe_layer(layer)
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    yield replicate(
        f"{megatron_prefix}{norm}", f"{hf_prefix}input_layernorm.weight", (shape.hidden_size,)
    )
    yield from _attention_shards(
        shape, parallel_rank, f"{megatron_prefix}self_attention.", f"{hf_prefix}self_attn."
    )
    norm = "pre_mlp_layernorm.weight"
    if fused and not is_moe:
        norm = "mlp.linear_fc1.layer_norm_weight"
    yield replicate(
        f"{megatron_prefix}{norm}",
        f"{hf_prefix}post_attention_layernorm.weight",
        (shape.hidden_size,),
    )
    if is_moe:
        yield from _moe_mlp_shards(
            shape, parallel_rank, f"{megatron_prefix}mlp.", f"{hf_prefix}mlp.", fused=fused
        )
    else:
        yield from _dense_mlp_shards(
            shape, parallel_rank, f"{megatron_prefix}mlp.", f"{hf_prefix}mlp."
        )


def _attention_shards(
    shape: ModelShape, parallel_rank: ModelParallelRank, megatron_prefix: str, hf_prefix: str
) -> Iterator[ShardLayout]:
    query = shape.num_heads * shape.head_dim
    rank, size = parallel_rank.tensor_rank, parallel_rank.tensor_size
    full_shape = (shape.hidden_size, query)
    yield slice_columns(
        f"{megatron_prefix}linear_proj.weight",
        f"{hf_prefix}o_proj.weight",
        full_shape,
        rank=rank,
        size=size,
    )
    if shape.o_proj_bias:
        yield replicate(
            f"{megatron_prefix}linear_proj.bias", f"{hf_prefix}o_proj.bias", (shape.hidden_size,)
        )
    row_shapes: dict[str, tuple[int, ...]] = {"weight": (shape.hidden_size,)}
    if shape.qkv_bias:
        row_shapes["bias"] = ()
    num_rows = (query + 2 * shape.num_kv_heads * shape.head_dim) // size
    window = (rank * num_rows, (rank + 1) * num_rows)
    for weight_or_bias, row_shape in row_shapes.items():
        name = f"{megatron_prefix}linear_qkv.{weight_or_bias}"
        rows = _qkv_rows(shape, hf_prefix, weight_or_bias)
        yield stack_rows(name, rows, row_shape, window=window)
    if shape.qk_norm:
        for letter in "qk":
            norm = f"{letter}_layernorm.weight"
            yield replicate(
                f"{megatron_prefix}{norm}", f"{hf_prefix}{letter}_norm.weight", (shape.head_dim,)
            )


def _qkv_rows(shape: ModelShape, hf_prefix: str, weight_or_bias: str) -> Iterator[RowRange]:
    width, queries = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    for group in range(shape.num_kv_heads):
        yield RowRange(f"{hf_prefix}q_proj.{weight_or_bias}", group * queries, queries)
        yield RowRange(f"{hf_prefix}k_proj.{weight_or_bias}", group * width, width)
        yield RowRange(f"{hf_prefix}v_proj.{weight_or_bias}", group * width, width)


def _dense_mlp_shards(
    shape: ModelShape, parallel_rank: ModelParallelRank, megatron_prefix: str, hf_prefix: str
) -> Iterator[ShardLayout]:
    rank, size = parallel_rank.tensor_rank, parallel_rank.tensor_size
    ffn_rows = shape.ffn_hidden_size // size
    fc1 = f"{megatron_prefix}linear_fc1"
    yield stack_rows(
        f"{fc1}.weight", _gate_up_rows(hf_prefix, "weight", rank, ffn_rows), (shape.hidden_size,)
    )
    if shape.mlp_bias:
        yield stack_rows(f"{fc1}.bias", _gate_up_rows(hf_prefix, "bias", rank, ffn_rows), ())
    name, full_shape = f"{hf_prefix}down_proj.weight", (shape.hidden_size, shape.ffn_hidden_size)
    yield slice_columns(
        f"{megatron_prefix}linear_fc2.weight", name, full_shape, rank=rank, size=size
    )
    if shape.mlp_bias:
        yield replicate(
            f"{megatron_prefix}linear_fc2.bias", f"{hf_prefix}down_proj.bias", (shape.hidden_size,)
        )


def _gate_up_rows(
    hf_prefix: str, weight_or_bias: str, rank: int, ffn_rows: int
) -> tuple[RowRange, RowRange]:
    start = rank * ffn_rows
    return (
        RowRange(f"{hf_prefix}gate_proj.{weight_or_bias}", start, ffn_rows),
        RowRange(f"{hf_prefix}up_proj.{weight_or_bias}", start, ffn_rows),
    )


def _moe_mlp_shards(
    shape: ModelShape,
    parallel_rank: ModelParallelRank,
    megatron_prefix: str,
    hf_prefix: str,
    *,
    fused: bool,
) -> Iterator[ShardLayout]:
    assert shape.moe is not None, "an MoE layer has experts"
    moe, hidden = shape.moe, shape.hidden_size
    rank, size = parallel_rank.expert_tensor_rank, parallel_rank.expert_tensor_size
    yield replicate(
        f"{megatron_prefix}router.weight", f"{hf_prefix}gate.weight", (moe.num_experts, hidden)
    )
    num_local_experts = moe.num_experts // parallel_rank.expert_size
    ffn_rows = moe.ffn_hidden_size // size
    fc1_shards, fc2_shards = [], []
    for local in range(num_local_experts):
        expert = f"{hf_prefix}experts.{parallel_rank.expert_rank * num_local_experts + local}."
        fc1, fc2 = (
            f"{megatron_prefix}experts.linear_{linear}.weight{local}"
            if fused
            else f"{megatron_prefix}experts.local_experts.{local}.linear_{linear}.weight"
            for linear in ("fc1", "fc2")
        )
        fc1_shards.append(
            stack_rows(fc1, _gate_up_rows(expert, "weight", rank, ffn_rows), (hidden,))
        )
        down, full_shape = f"{expert}down_proj.weight", (hidden, moe.ffn_hidden_size)
        fc2_shards.append(slice_columns(fc2, down, full_shape, rank=rank, size=size))
    if fused:
        yield from fc1_shards + fc2_shards
    else:
        for pair in zip(fc1_shards, fc2_shards, strict=True):
            yield from pair

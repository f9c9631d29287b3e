"""One decoder layer of Megatron's `GPTModel` as blocks of Hugging Face tensors.

    linear_qkv   rows grouped by key/value head: [queries of the group, key, value] each; the
                 rows of all groups are then cut evenly over tensor ranks. With more tensor
                 ranks than key/value heads a cut falls inside a group (Megatron gathers the
                 activations again), so no row is held twice.
    linear_fc1   the rank's rows of gate_proj over its rows of up_proj
    linear_proj, linear_fc2   cut by columns; their biases are whole
    experts      contiguous per expert rank; inside an expert as fc1 and fc2, over the
                 expert-tensor ranks
    norms, router   whole

Transformer Engine's modules (`fused`) hold the norm before a linear in that linear, and the
experts of a rank in one module: other names, same tensors. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.reshard.cuts import Rows, columns, stacked, whole

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.place import Place


def layer_shapes(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Full shape of every Hugging Face tensor of a layer, in model order."""
    hidden = shape.hidden
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = (
        _linear("self_attn.q_proj", query, hidden, bias=shape.qkv_bias)
        | _linear("self_attn.k_proj", key, hidden, bias=shape.qkv_bias)
        | _linear("self_attn.v_proj", key, hidden, bias=shape.qkv_bias)
        | _linear("self_attn.o_proj", hidden, query, bias=shape.out_bias)
    )
    if shape.qk_norm:
        shapes |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (shape.head_dim,)
        )
    mlps = {"mlp.": shape.ffn}
    if shape.moe and shape.is_sparse(layer):
        shapes |= _linear("mlp.gate", shape.moe.num_experts, hidden, bias=False)
        experts = range(shape.moe.num_experts)
        mlps = {f"mlp.experts.{expert}.": shape.moe.ffn for expert in experts}
    for mlp, ffn in mlps.items():
        shapes |= (
            _linear(f"{mlp}gate_proj", ffn, hidden, bias=shape.mlp_bias)
            | _linear(f"{mlp}up_proj", ffn, hidden, bias=shape.mlp_bias)
            | _linear(f"{mlp}down_proj", hidden, ffn, bias=shape.mlp_bias)
        )
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    return {f"model.layers.{layer}.{name}": full for name, full in shapes.items()}


def _linear(name: str, rows: int, width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, width)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})


def layer_shards(
    shape: ModelShape, place: Place, layer: int, ours: str, *, fused: bool
) -> Iterator[ShardLayout]:
    """Parameters of one layer on one rank, in model order.

    layer: counted over the whole model. ours: what Megatron's names begin with, such as
    `decoder.layers.0.`.
    """
    theirs = f"model.layers.{layer}."
    sparse = shape.is_sparse(layer)
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    yield whole(f"{ours}{norm}", f"{theirs}input_layernorm.weight", (shape.hidden,))
    yield from _attention(shape, place, f"{ours}self_attention.", f"{theirs}self_attn.")
    norm = "pre_mlp_layernorm.weight"
    if fused and not sparse:
        norm = "mlp.linear_fc1.layer_norm_weight"
    yield whole(f"{ours}{norm}", f"{theirs}post_attention_layernorm.weight", (shape.hidden,))
    if sparse:
        yield from _sparse_mlp(shape, place, f"{ours}mlp.", f"{theirs}mlp.", fused=fused)
    else:
        yield from _dense_mlp(shape, place, f"{ours}mlp.", f"{theirs}mlp.")


def _attention(shape: ModelShape, place: Place, ours: str, theirs: str) -> Iterator[ShardLayout]:
    query = shape.num_heads * shape.head_dim
    rank, size = place.tensor_rank, place.tensor_size
    full = (shape.hidden, query)
    yield columns(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", full, rank=rank, size=size)
    if shape.out_bias:
        yield whole(f"{ours}linear_proj.bias", f"{theirs}o_proj.bias", (shape.hidden,))
    tails: dict[str, tuple[int, ...]] = {"weight": (shape.hidden,)}
    if shape.qkv_bias:
        tails["bias"] = ()
    share = (query + 2 * shape.num_kv_heads * shape.head_dim) // size
    window = (rank * share, (rank + 1) * share)
    for kind, tail in tails.items():
        rows = _qkv_rows(shape, theirs, kind)
        yield stacked(f"{ours}linear_qkv.{kind}", rows, tail, window=window)
    if shape.qk_norm:
        for letter in "qk":
            norm = f"{letter}_layernorm.weight"
            yield whole(f"{ours}{norm}", f"{theirs}{letter}_norm.weight", (shape.head_dim,))


def _qkv_rows(shape: ModelShape, theirs: str, kind: str) -> Iterator[Rows]:
    width, queries = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    for group in range(shape.num_kv_heads):
        yield Rows(f"{theirs}q_proj.{kind}", group * queries, queries)
        yield Rows(f"{theirs}k_proj.{kind}", group * width, width)
        yield Rows(f"{theirs}v_proj.{kind}", group * width, width)


def _dense_mlp(shape: ModelShape, place: Place, ours: str, theirs: str) -> Iterator[ShardLayout]:
    rank, size = place.tensor_rank, place.tensor_size
    half = shape.ffn // size
    first = f"{ours}linear_fc1"
    yield stacked(f"{first}.weight", _halves(theirs, "weight", rank, half), (shape.hidden,))
    if shape.mlp_bias:
        yield stacked(f"{first}.bias", _halves(theirs, "bias", rank, half), ())
    name, full = f"{theirs}down_proj.weight", (shape.hidden, shape.ffn)
    yield columns(f"{ours}linear_fc2.weight", name, full, rank=rank, size=size)
    if shape.mlp_bias:
        yield whole(f"{ours}linear_fc2.bias", f"{theirs}down_proj.bias", (shape.hidden,))


def _halves(theirs: str, kind: str, rank: int, half: int) -> tuple[Rows, Rows]:
    start = rank * half
    return (
        Rows(f"{theirs}gate_proj.{kind}", start, half),
        Rows(f"{theirs}up_proj.{kind}", start, half),
    )


def _sparse_mlp(
    shape: ModelShape, place: Place, ours: str, theirs: str, *, fused: bool
) -> Iterator[ShardLayout]:
    assert shape.moe is not None, "a sparse layer has experts"
    moe, hidden = shape.moe, shape.hidden
    rank, size = place.expert_tensor_rank, place.expert_tensor_size
    yield whole(f"{ours}router.weight", f"{theirs}gate.weight", (moe.num_experts, hidden))
    share, half = moe.num_experts // place.expert_size, moe.ffn // size
    first, second = [], []
    for local in range(share):
        expert = f"{theirs}experts.{place.expert_rank * share + local}."
        names = [
            f"{ours}experts.linear_{linear}.weight{local}"
            if fused
            else f"{ours}experts.local_experts.{local}.linear_{linear}.weight"
            for linear in ("fc1", "fc2")
        ]
        first.append(stacked(names[0], _halves(expert, "weight", rank, half), (hidden,)))
        down, full = f"{expert}down_proj.weight", (hidden, moe.ffn)
        second.append(columns(names[1], down, full, rank=rank, size=size))
    if fused:
        yield from first + second
    else:
        for pair in zip(first, second, strict=True):
            yield from pair

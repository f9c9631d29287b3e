"""One layer's parameters and rectangles, by hand."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.decoder_layer import layer_shards
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from tests.reshard.model_cuts import BIASES, make_moe_shape, make_shape


def shards_of(shape, layer=0, *, fused=False, **parallel_rank):
    shards = layer_shards(shape, ModelParallelRank(**parallel_rank), layer, "", fused=fused)
    return {shard.name: shard for shard in shards}


def rows_of(shard):
    """(projection, first row there, first row here, rows) of every block."""
    return [
        (
            block.hf_name.split(".")[-2],
            block.hf_rect.start[0],
            block.local_rect.start[0],
            block.hf_rect.shape[0],
        )
        for block in shard.blocks
    ]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_rows_are_grouped_by_key_value_head(kind):
    # 8 query heads over 4 key/value heads, width 4: a group is 8 rows of q, 4 of k, 4 of v.
    shards = shards_of(make_shape(**BIASES), tensor_rank=1, tensor_size=2)
    shard = shards[f"self_attention.linear_qkv.{kind}"]
    assert shard.shape == ((32, 32) if kind == "weight" else (32,))
    assert {block.hf_name.split(".")[-1] for block in shard.blocks} == {kind}
    assert rows_of(shard) == [
        ("q_proj", 16, 0, 8),
        ("k_proj", 8, 8, 4),
        ("v_proj", 8, 12, 4),
        ("q_proj", 24, 16, 8),
        ("k_proj", 12, 24, 4),
        ("v_proj", 12, 28, 4),
    ]


def test_with_more_ranks_than_key_value_heads_a_group_is_divided():
    # One group has 4 heads of q, one of k and of v, 4 rows each: 24 rows, 12 a rank.
    shape = make_shape(num_heads=8, num_kv_heads=2)
    shards = [shards_of(shape, tensor_rank=rank, tensor_size=4) for rank in range(4)]
    assert [rows_of(shard["self_attention.linear_qkv.weight"]) for shard in shards] == [
        [("q_proj", 0, 0, 12)],
        [("q_proj", 12, 0, 4), ("k_proj", 0, 4, 4), ("v_proj", 0, 8, 4)],
        [("q_proj", 16, 0, 12)],
        [("q_proj", 28, 0, 4), ("k_proj", 4, 4, 4), ("v_proj", 4, 8, 4)],
    ]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_gate_rows_come_before_up_rows_on_every_rank(kind):
    shards = shards_of(make_shape(**BIASES), tensor_rank=2, tensor_size=4)
    shard = shards[f"mlp.linear_fc1.{kind}"]
    assert shard.shape[0] == 12
    assert rows_of(shard) == [("gate_proj", 12, 0, 6), ("up_proj", 12, 6, 6)]


def test_row_parallel_linears_are_sharded_by_columns_and_their_biases_replicated():
    shards = shards_of(make_shape(**BIASES), tensor_rank=1, tensor_size=2)
    assert shards["self_attention.linear_proj.weight"].blocks[0].hf_rect == Rect((0, 16), (32, 32))
    assert shards["mlp.linear_fc2.weight"].blocks[0].hf_rect == Rect((0, 12), (32, 24))
    for name in ("self_attention.linear_proj.bias", "mlp.linear_fc2.bias"):
        assert shards[name].blocks[0].hf_rect == Rect((0,), (32,))


def test_experts_are_contiguous_per_expert_rank_and_sharded_inside():
    experts = {"expert_rank": 1, "expert_size": 2}
    shards = shards_of(make_moe_shape(), 3, **experts, expert_tensor_rank=1, expert_tensor_size=2)
    assert shards["mlp.router.weight"].shape == (4, 32)
    assert "mlp.experts.local_experts.2.linear_fc1.weight" not in shards
    first = shards["mlp.experts.local_experts.1.linear_fc1.weight"]
    assert first.blocks[0].hf_name == "model.layers.3.mlp.experts.3.gate_proj.weight"
    assert rows_of(first) == [("gate_proj", 3, 0, 3), ("up_proj", 3, 3, 3)]
    second = shards["mlp.experts.local_experts.1.linear_fc2.weight"]
    assert second.shape == (32, 3)
    assert second.blocks[0].hf_rect == Rect((0, 3), (32, 6))


PLAIN = [
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def test_transformer_engine_changes_names_of_norms_and_no_blocks():
    plain, fused = shards_of(make_shape()), shards_of(make_shape(), fused=True)
    assert list(plain) == PLAIN
    assert list(fused) == [FUSED_NORMS.get(name, name) for name in PLAIN]
    blocks = [[shard.blocks for shard in shards.values()] for shards in (plain, fused)]
    assert blocks[0] == blocks[1]


def test_a_moe_layer_keeps_its_norm_and_groups_its_experts():
    shape = make_moe_shape(num_experts=2, moe_layer_pattern=[True, False, True, True])
    names = [name for name in shards_of(shape, fused=True) if "self_attention" not in name]
    assert names == [
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight0",
        "mlp.experts.linear_fc1.weight1",
        "mlp.experts.linear_fc2.weight0",
        "mlp.experts.linear_fc2.weight1",
    ]
    assert "mlp.linear_fc1.layer_norm_weight" in shards_of(shape, 1, fused=True)

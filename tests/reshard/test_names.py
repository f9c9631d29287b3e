from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Rect, check_cover
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes, megatron_layout, one_replica, padded_vocab


def make_shape(**changes):
    sizes = {
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 4,
        "hidden": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "ffn": 24,
        "vocab": 50,
        "norm_eps": 1e-6,
        "rope_base": 1e4,
        "max_positions": 64,
        "tied": True,
    }
    return ModelShape(**(sizes | changes))


def all_ranks(shape, tensor_size, pipeline_size):
    return [
        megatron_layout(
            shape,
            tensor_rank=tensor_rank,
            tensor_size=tensor_size,
            pipeline_rank=pipeline_rank,
            pipeline_size=pipeline_size,
        )
        for pipeline_rank in range(pipeline_size)
        for tensor_rank in range(tensor_size)
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pipeline_size", [1, 2])
@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_the_ranks_hold_every_element_once(tensor_size, pipeline_size, tied):
    shape = make_shape(tied=tied)
    ranks = all_ranks(shape, tensor_size, pipeline_size)
    check_cover(hf_shapes(shape), one_replica(ranks), owner="policy")


@settings(max_examples=40, deadline=None)
@given(
    tensor_size=st.sampled_from([1, 2, 3, 4]),
    pipeline_size=st.integers(1, 3),
    groups=st.integers(1, 2),
    queries=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8]),
    ffn=st.integers(1, 5),
    layers=st.integers(1, 2),
    vocab=st.integers(1, 90),
    tied=st.booleans(),
)
def test_any_divisible_shape_is_covered(
    tensor_size, pipeline_size, groups, queries, head_dim, ffn, layers, vocab, tied
):
    shape = make_shape(
        num_kv_heads=groups * tensor_size,
        num_heads=groups * tensor_size * queries,
        head_dim=head_dim,
        ffn=ffn * tensor_size,
        num_layers=layers * pipeline_size,
        vocab=vocab,
        tied=tied,
    )
    ranks = all_ranks(shape, tensor_size, pipeline_size)
    check_cover(hf_shapes(shape), one_replica(ranks), owner="policy")
    for shard in (shard for rank in ranks for shard in rank):
        inside = sum(block.local_rect.numel for block in shard.blocks)
        whole = Rect.whole(shard.shape)
        assert all(block.local_rect.intersect(whole) == block.local_rect for block in shard.blocks)
        assert inside == whole.numel or "embed" in shard.name or "output" in shard.name


def test_qkv_rows_are_grouped_by_key_value_head():
    # 8 query heads over 4 key/value heads, width 4: a group is 8 rows of q, 4 of k, 4 of v.
    shard = next(
        shard
        for shard in all_ranks(make_shape(), 2, 1)[1]
        if shard.name == "decoder.layers.0.self_attention.linear_qkv.weight"
    )
    assert shard.shape == (32, 32)
    rows = [
        (block.hf_name.split(".")[-2], block.hf_rect.start[0], block.local_rect.start[0])
        for block in shard.blocks
    ]
    assert rows == [
        ("q_proj", 16, 0),
        ("k_proj", 8, 8),
        ("v_proj", 8, 12),
        ("q_proj", 24, 16),
        ("k_proj", 12, 24),
        ("v_proj", 12, 28),
    ]


def test_the_vocabulary_is_padded_and_tied_stages_both_hold_it():
    shape = make_shape()
    assert padded_vocab(shape, 4) == 64
    last_of_four = all_ranks(shape, 4, 1)[3][0]
    assert last_of_four.shape == (16, 32)
    assert last_of_four.blocks[0].local_rect == Rect((0, 0), (2, 32))
    first, last = all_ranks(shape, 1, 2)
    assert first[0].blocks[0].hf_name == last[-1].blocks[0].hf_name
    assert last[-1].name == "output_layer.weight"


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, (3, 1), r"parallel.tensor=3: the model's num_attention_heads is 8"),
        ({}, (8, 1), r"parallel.tensor=8: the model's num_key_value_heads is 4"),
        ({"ffn": 25}, (2, 1), r"parallel.tensor=2: the model's intermediate_size is 25"),
        ({}, (1, 3), r"parallel.pipeline=3: the model's num_hidden_layers is 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes, sizes, message):
    with pytest.raises(ValueError, match=message):
        all_ranks(make_shape(**changes), *sizes)

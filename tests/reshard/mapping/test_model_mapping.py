"""The whole mapping: names and shapes as in transformers, and a cover for any parallel sizes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.layout import Rect, check_cover, check_disjoint
from mega_agentrl.reshard.mapping.model_mapping import (
    check_divisible,
    hf_shapes,
    is_expert_param,
    is_tensor_replicated,
    megatron_layout,
    padded_vocab_size,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from tests.reshard.model_cuts import (
    make_moe_shape,
    make_shape,
    models_and_ranks,
    trainer_layouts_of,
)
from tests.tiny_models import POLICIES, REWARDS, make_tiny_model


def names_of(layout):
    return [shard.name for shard in layout]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in (*POLICIES, *REWARDS)),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    ],
    ids=[*POLICIES, *REWARDS, "llama-biases", "qwen3-biases", "qwen3-moe-and-dense"],
)
def test_names_and_shapes_are_those_of_the_saved_checkpoint(tmp_path, name, changes, tied):
    folder = make_tiny_model(name, tmp_path, tied=tied, num_hidden_layers=2, **changes)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    assert hf_shapes(ModelShape.from_folder(folder)) == saved


def drop_replicas(ranks):
    """The shards of several ranks without those that an earlier rank also holds."""
    distinct = {}
    for shard in (shard for shards in ranks for shard in shards):
        key = tuple((block.hf_name, block.hf_rect) for block in shard.blocks)
        distinct.setdefault(key, shard)
    return list(distinct.values())


@settings(max_examples=60, deadline=None)
@given(models_and_ranks())
def test_the_ranks_of_any_cut_hold_every_element_once(case):
    shape, parallel_ranks = case
    for fused in (False, True):
        layouts = [megatron_layout(shape, rank, fused=fused) for rank in parallel_ranks]
        check_cover(hf_shapes(shape), drop_replicas(layouts), owner="policy")
        for shard in itertools.chain(*layouts):
            whole = Rect.whole(shard.shape)
            rects = [block.local_rect for block in shard.blocks]
            assert all(rect.intersect(whole) == rect for rect in rects)
            check_disjoint(shard.name, rects, owner="policy")
            is_full = sum(rect.numel for rect in rects) == whole.numel
            assert is_full or "embed" in shard.name or "output" in shard.name
        for layout in layouts:
            assert len(set(names_of(layout))) == len(layout)


@settings(max_examples=60, deadline=None)
@given(models_and_ranks())
def test_replicated_is_what_all_tensor_ranks_hold_alike(case):
    shape, parallel_ranks = case
    held = defaultdict(set)
    for fused, rank in itertools.product((False, True), parallel_ranks):
        for shard in megatron_layout(shape, rank, fused=fused):
            expert = is_expert_param(shard.name)
            size = rank.expert_tensor_size if expert else rank.tensor_size
            expert_rank = rank.expert_rank if expert else 0
            key = (size, fused, rank.pipeline_rank, expert_rank, shard.name)
            held[key].add(shard.blocks)
    for (size, *_, name), blocks in held.items():
        if size > 1 and () not in blocks:  # ranks with nothing but padding look alike
            assert len(blocks) == (1 if is_tensor_replicated(shape, name) else size), name


def test_the_vocabulary_is_padded_and_tied_stages_both_hold_it():
    shape = make_shape()
    assert padded_vocab_size(shape, 4) == 64
    last_of_four = trainer_layouts_of(shape, tensor=4)[3][0]
    assert last_of_four.shape == (16, 32)
    assert last_of_four.blocks[0].local_rect == Rect((0, 0), (2, 32))
    first, last = trainer_layouts_of(shape, pipeline=2)
    assert first[0].blocks == last[-1].blocks
    assert last[-1].name == "output_layer.weight"
    assert "output_layer.weight" not in names_of(trainer_layouts_of(shape)[0])
    (untied,) = trainer_layouts_of(make_shape(tie_word_embeddings=False))
    assert untied[-1].blocks[0].hf_name == "lm_head.weight"


def test_virtual_stages_hold_every_second_run_of_layers():
    shape = make_shape(num_layers=8, tie_word_embeddings=False)
    norm = "input_layernorm.weight"
    found = [
        [(s.name, s.blocks[0].hf_name) for s in layout if s.name.endswith(norm)]
        for layout in trainer_layouts_of(shape, pipeline=2, virtual=2)
    ]
    for rank, layers in enumerate([(0, 1, 4, 5), (2, 3, 6, 7)]):
        names = [f"chunk{c}.decoder.layers.{layer}.{norm}" for c in range(2) for layer in range(2)]
        hf_names = [f"model.layers.{layer}.{norm}" for layer in layers]
        assert found[rank] == list(zip(names, hf_names, strict=True))


def test_the_ends_hold_a_layer_fewer_where_the_stages_do_not_divide_the_layers():
    shape = make_shape(num_layers=6, tie_word_embeddings=False)
    norm = "input_layernorm.weight"
    found = [
        [s.blocks[0].hf_name for s in layout if s.name.endswith(norm)]
        for layout in trainer_layouts_of(shape, pipeline=2, virtual=2)
    ]
    layers = [(0, 3, 4), (1, 2, 5)]
    assert found == [[f"model.layers.{n}.{norm}" for n in numbers] for numbers in layers]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "qwen3_reward"])
def test_a_checkpoint_of_transformers_is_read_by_slices(tmp_path, name):
    folder = make_tiny_model(name, tmp_path, num_hidden_layers=2)
    shape = ModelShape.from_folder(folder)
    experts = {"expert": 2} if shape.moe else {}
    back = {key: torch.full(full, torch.nan) for key, full in hf_shapes(shape).items()}
    for layout in trainer_layouts_of(shape, tensor=2, pipeline=2, **experts):
        parameters = {shard.name: torch.full(shard.shape, torch.nan) for shard in layout}
        read_shards(folder, layout, hf_shapes(shape), parameters)
        assert not any(parameter.isnan().any() for parameter in parameters.values())
        for shard in layout:
            for block in shard.blocks:
                rows = parameters[shard.name][block.local_rect.slices]
                back[block.hf_name][block.hf_rect.slices] = rows
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert all(torch.equal(back[key], file.get_tensor(key)) for key in file.keys())


DENSE, MOE = make_shape(), make_moe_shape()
ODD_WIDTH = {"ffn_hidden_size": 25}


@pytest.mark.parametrize(
    ("shape", "sizes", "key", "got", "of_model"),
    [
        (DENSE, {"tensor_size": 3}, "parallel.tensor", 3, "num_attention_heads, 8"),
        (
            make_shape(num_heads=12, num_kv_heads=6, ffn_hidden_size=24),
            {"tensor_size": 4},
            "parallel.tensor",
            4,
            "num_key_value_heads, 6",
        ),
        (
            make_shape(num_heads=8, num_kv_heads=2, head_dim=1, ffn_hidden_size=8),
            {"tensor_size": 8},
            "parallel.tensor",
            8,
            "rows of q, k and v, 12",
        ),
        (
            replace(DENSE, **ODD_WIDTH),
            {"tensor_size": 2},
            "parallel.tensor",
            2,
            "intermediate_size, 25",
        ),
        (
            replace(make_moe_shape(moe_layer_pattern=[True, False, True, True]), **ODD_WIDTH),
            {"tensor_size": 2},
            "parallel.tensor",
            2,
            "intermediate_size, 25",
        ),
        (
            DENSE,
            {"pipeline_size": 5},
            "parallel.pipeline * parallel.virtual_pipeline",
            5,
            "4 layers (1, 2, 3, 4)",
        ),
        (
            DENSE,
            {"pipeline_size": 2, "virtual_size": 4},
            "parallel.pipeline * parallel.virtual_pipeline",
            8,
            "4 layers (1, 2, 3, 4)",
        ),
        (DENSE, {"virtual_size": 2}, "parallel.virtual_pipeline", 2, "parallel.pipeline=1"),
        (DENSE, {"expert_size": 2}, "parallel.expert", 2, "no experts"),
        (MOE, {"expert_size": 3}, "parallel.expert", 3, "num_experts, 4"),
        (
            MOE,
            {"expert_tensor_size": 4},
            "parallel.expert_tensor",
            4,
            "moe_intermediate_size, 6",
        ),
    ],
    ids=[
        *("heads", "kv-heads", "qkv-rows", "dense-width", "dense-width-among-experts"),
        *("layers", "virtual-layers", "virtual-alone", "no-experts", "experts", "expert-width"),
    ],
)
def test_sizes_that_do_not_divide_are_named(shape, sizes, key, got, of_model):
    with pytest.raises(ConfigError) as caught:
        megatron_layout(shape, ModelParallelRank(**sizes))
    assert (caught.value.key, caught.value.got) == (key, got)
    assert of_model in caught.value.expected


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [(DENSE, {"expert_tensor_size": 7}), (replace(MOE, **ODD_WIDTH), {"tensor_size": 2})],
    ids=["experts-of-a-dense-model", "dense-width-of-a-moe-model"],
)
def test_sizes_of_layers_that_a_model_does_not_have_do_not_matter(shape, sizes):
    check_divisible(shape, ModelParallelRank(**sizes))

"""The whole mapping: names and shapes against transformers, covers and round trips for any cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.layout import Rect, check_cover
from mega_agentrl.reshard.mapping.model_mapping import (
    check_divisible,
    hf_shapes,
    is_expert_param,
    is_tensor_replicated,
    megatron_layout,
    padded_vocab_size,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from tests.reshard.model_cuts import (
    BIASES,
    all_parallel_ranks,
    make_moe_shape,
    make_shape,
    models_and_ranks,
)
from tests.tiny_models import POLICIES, REWARDS, make_tiny_model


def layouts_of(shape, parallel_ranks, *, fused=False):
    return [megatron_layout(shape, parallel_rank, fused=fused) for parallel_rank in parallel_ranks]


def names_of(layout):
    return [shard.name for shard in layout]


@pytest.mark.parametrize("name", [*POLICIES, *REWARDS])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_the_saved_checkpoint(tmp_path, name, tied):
    folder = make_tiny_model(name, tmp_path, tied=tied, num_hidden_layers=1)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    assert hf_shapes(ModelShape.from_folder(folder)) == saved


def test_biases_and_dense_layers_among_sparse_ones_are_saved_so_too(tmp_path):
    changes = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3": {"attention_bias": True},
        "qwen3_moe": {"mlp_only_layers": [1], "attention_bias": True},
    }
    for name, change in changes.items():
        folder = make_tiny_model(name, tmp_path / name, num_hidden_layers=2, **change)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        assert hf_shapes(ModelShape.from_folder(folder)) == saved, name


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
        layouts = layouts_of(shape, parallel_ranks, fused=fused)
        check_cover(hf_shapes(shape), drop_replicas(layouts), owner="policy")
        for shard in (shard for layout in layouts for shard in layout):
            inside = sum(block.local_rect.numel for block in shard.blocks)
            whole = Rect.whole(shard.shape)
            rects = [block.local_rect for block in shard.blocks]
            assert all(rect.intersect(whole) == rect for rect in rects)
            assert inside == whole.numel or "embed" in shard.name or "output" in shard.name
        for layout in layouts:
            assert len(set(names_of(layout))) == len(layout)


@settings(max_examples=30, deadline=None)
@given(models_and_ranks())
def test_a_model_survives_the_way_into_shards_and_back_bit_for_bit(case):
    shape, parallel_ranks = case
    generator = torch.Generator().manual_seed(1)
    model = {
        name: torch.randn(full, generator=generator) for name, full in hf_shapes(shape).items()
    }
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.items()}
    for layout in layouts_of(shape, parallel_ranks):
        for shard in layout:
            local = torch.zeros(shard.shape)
            for block in shard.blocks:
                local[block.local_rect.slices] = model[block.hf_name][block.hf_rect.slices]
            for block in shard.blocks:
                back[block.hf_name][block.hf_rect.slices] = local[block.local_rect.slices]
    for name, tensor in model.items():
        assert torch.equal(back[name], tensor), name


@settings(max_examples=60, deadline=None)
@given(models_and_ranks())
def test_replicated_is_what_all_ranks_of_the_cut_hold_alike(case):
    shape, parallel_ranks = case
    held = {}
    for parallel_rank, layout in zip(
        parallel_ranks, layouts_of(shape, parallel_ranks), strict=True
    ):
        for shard in layout:
            expert = is_expert_param(shard.name)
            size = parallel_rank.expert_tensor_size if expert else parallel_rank.tensor_size
            owner = (
                parallel_rank.pipeline_rank,
                parallel_rank.expert_rank if expert else 0,
                shard.name,
            )
            held.setdefault((size, *owner), set()).add(shard.blocks)
    for (size, *_, name), blocks in held.items():
        if size > 1 and () not in blocks:  # ranks with nothing but padding look alike
            assert len(blocks) == (1 if is_tensor_replicated(shape, name) else size), name


def test_what_counts_once_by_name():
    shape, scalar = (
        make_shape(**BIASES),
        make_shape(head=HeadKind.scalar, tie_word_embeddings=False),
    )
    (layout,) = layouts_of(shape, [ModelParallelRank()])
    once = {
        name.split("decoder.")[-1] for name in names_of(layout) if is_tensor_replicated(shape, name)
    }
    layer = "layers.0."
    assert {name for name in once if name.startswith(layer) or name.startswith("final")} == {
        f"{layer}input_layernorm.weight",
        f"{layer}pre_mlp_layernorm.weight",
        f"{layer}self_attention.linear_proj.bias",
        f"{layer}self_attention.q_layernorm.weight",
        f"{layer}self_attention.k_layernorm.weight",
        f"{layer}mlp.linear_fc2.bias",
        "final_layernorm.weight",
    }
    assert is_tensor_replicated(scalar, "chunk1.output_layer.weight")
    assert not is_tensor_replicated(shape, "chunk1.output_layer.weight")
    fused = megatron_layout(make_moe_shape(), ModelParallelRank(), fused=True)
    experts = [name for name in names_of(fused) if is_expert_param(name)]
    assert len(experts) == 4 * 4 * 2
    assert not any(is_tensor_replicated(make_moe_shape(), name) for name in experts)


def test_the_vocabulary_is_padded_and_tied_stages_both_hold_it():
    shape = make_shape()
    assert padded_vocab_size(shape, 4) == 64
    last_of_four = layouts_of(shape, all_parallel_ranks(tensor=4))[3][0]
    assert last_of_four.shape == (16, 32)
    assert last_of_four.blocks[0].local_rect == Rect((0, 0), (2, 32))
    first, last = layouts_of(shape, all_parallel_ranks(pipeline=2))
    assert first[0].blocks == last[-1].blocks
    assert last[-1].name == "output_layer.weight"
    assert "output_layer.weight" not in names_of(layouts_of(shape, [ModelParallelRank()])[0])
    untied = layouts_of(make_shape(tie_word_embeddings=False), [ModelParallelRank()])[0]
    assert untied[-1].blocks[0].hf_name == "lm_head.weight"


def test_ranks_with_nothing_but_padding_have_no_blocks():
    shards = [
        layout[0] for layout in layouts_of(make_shape(vocab_size=3), all_parallel_ranks(tensor=2))
    ]
    assert [len(shard.blocks) for shard in shards] == [1, 0]
    assert shards[1].shape == (8, 32)


def test_virtual_stages_hold_every_second_run_of_layers():
    shape = make_shape(num_layers=8, tie_word_embeddings=False)
    ranks = layouts_of(shape, all_parallel_ranks(pipeline=2, virtual=2))
    got = [
        {
            (shard.name.split("input")[0], shard.blocks[0].hf_name.split("input")[0])
            for shard in layout
            if shard.name.endswith("input_layernorm.weight")
        }
        for layout in ranks
    ]
    # Chunk 0 of rank 0 is layers 0-1, chunk 0 of rank 1 layers 2-3, chunk 1 of rank 0 layers 4-5.
    runs = [{(0, 0): 0, (0, 1): 1, (1, 0): 4, (1, 1): 5}, {(0, 0): 2, (0, 1): 3, (1, 0): 6}]
    for rank, run in enumerate(runs):
        for (chunk, local), layer in run.items():
            ours = f"chunk{chunk}.decoder.layers.{local}."
            assert (ours, f"model.layers.{layer}.") in got[rank]
    assert names_of(ranks[0])[0] == "chunk0.embedding.word_embeddings.weight"
    assert names_of(ranks[1])[-2:] == [
        "chunk1.decoder.final_layernorm.weight",
        "chunk1.output_layer.weight",
    ]


def test_a_scalar_head_is_whole_on_every_tensor_rank_of_the_last_stage():
    shape = make_shape(head=HeadKind.scalar, tie_word_embeddings=False)
    ranks = layouts_of(shape, all_parallel_ranks(tensor=2, pipeline=2))
    heads = [layout[-1] for layout in ranks[2:]]
    assert [head.name for head in heads] == ["output_layer.weight"] * 2
    assert heads[0].blocks == heads[1].blocks
    assert heads[0].blocks[0].hf_name == "score.weight"
    assert heads[0].shape == (1, 32)
    assert "output_layer.weight" not in names_of(ranks[0])


def test_experts_of_data_ranks_are_other_experts_or_replicas():
    shape = make_moe_shape()
    layouts = layouts_of(shape, all_parallel_ranks(data=4, expert=2))
    held = [
        {block.hf_name for shard in layout if is_expert_param(shard.name) for block in shard.blocks}
        for layout in layouts
    ]
    assert held[0] == held[2]
    assert held[0].isdisjoint(held[1])
    check_cover(hf_shapes(shape), drop_replicas(layouts), owner="policy")


def test_a_cut_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"parallel.tensor=3"):
        megatron_layout(make_shape(), ModelParallelRank(tensor_size=3))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "qwen3_reward"])
def test_a_checkpoint_of_transformers_is_read_by_slices(tmp_path, name):
    folder = make_tiny_model(name, tmp_path, num_hidden_layers=2)
    shape = ModelShape.from_folder(folder)
    cut = {"expert": 2} if shape.moe else {}
    back = {key: torch.full(full, torch.nan) for key, full in hf_shapes(shape).items()}
    for layout in layouts_of(shape, all_parallel_ranks(tensor=2, pipeline=2, **cut)):
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


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (DENSE, {"tensor_size": 3}, r"parallel.tensor=3: the model's num_attention_heads is 8"),
        (
            make_shape(num_heads=12, num_kv_heads=6, ffn_hidden_size=24),
            {"tensor_size": 4},
            r"parallel.tensor=4: the model's num_key_value_heads is 6; expected a divisor or a",
        ),
        (
            make_shape(num_heads=8, num_kv_heads=2, head_dim=1, ffn_hidden_size=8),
            {"tensor_size": 8},
            r"parallel.tensor=8: the model's rows of q, k and v is 12",
        ),
        (
            make_shape(ffn_hidden_size=25),
            {"tensor_size": 2},
            r"tensor=2: the model's intermediate_size is 25",
        ),
        (DENSE, {"pipeline_size": 3}, r"virtual_pipeline=3: the model's num_hidden_layers is 4"),
        (
            DENSE,
            {"pipeline_size": 2, "virtual_size": 4},
            r"parallel.pipeline \* parallel.virtual_pipeline=8: the model's num_hidden_layers is 4",
        ),
        (
            DENSE,
            {"virtual_size": 2},
            r"parallel.virtual_pipeline=2: expected 1 with parallel.pipeline=1",
        ),
        (DENSE, {"expert_size": 2}, r"parallel.expert=2: expected 1, the model has no experts"),
        (MOE, {"expert_size": 3}, r"parallel.expert=3: the model's num_experts is 4"),
        (
            MOE,
            {"expert_tensor_size": 4},
            r"parallel.expert_tensor=4: the model's moe_intermediate_size is 6",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(shape, sizes, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_divisible(shape, ModelParallelRank(**sizes))
    assert "expected" in str(caught.value)
    assert "probable cause" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (DENSE, {"tensor_size": 8}),  # each of 4 key/value heads on two ranks
        (DENSE, {"pipeline_size": 2, "virtual_size": 2}),
        (DENSE, {"expert_tensor_size": 7}),  # of no meaning without experts
        (MOE, {"expert_size": 4, "expert_tensor_size": 3}),
        (MOE, {"tensor_size": 4}),
    ],
)
def test_what_divides_passes(shape, sizes):
    check_divisible(shape, ModelParallelRank(**sizes))


def test_the_dense_width_counts_only_where_a_layer_is_dense():
    odd = replace(MOE, ffn_hidden_size=25)
    check_divisible(odd, ModelParallelRank(tensor_size=2))
    mixed = replace(make_moe_shape(moe_layer_pattern=[True, False, True, True]), ffn_hidden_size=25)
    with pytest.raises(ValueError, match="intermediate_size is 25"):
        check_divisible(mixed, ModelParallelRank(tensor_size=2))

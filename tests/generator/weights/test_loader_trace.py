"""What is traced is what really happens: parameters assembled from the traced rectangles against
parameters that vLLM's loader has filled from disk, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.distributed import parallel_state

from mega_agentrl.generator.weights.loader_trace import (
    build_meta_copy,
    build_meta_model,
    fake_tensor_rank,
    make_vllm_config,
    trace_engine_layouts,
    trace_model_layout,
)
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.topology import RankLocation
from tests.reshard.model_cuts import all_parallel_ranks
from tests.reshard.numpy_transfer import execute, filled, make_tensors
from tests.reshard.rollout_cuts import rollout_layout
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    folder = make_tiny_model("qwen3", path, head_dim=32, num_attention_heads=32)
    return make_vllm_config(str(folder), tensor_size=32, dtype="bfloat16")


def test_a_rank_is_asked_for_by_model_code_and_forgotten_after(config):
    before = parallel_state._TP
    with fake_tensor_rank(config, 3):
        assert parallel_state.get_tensor_model_parallel_rank() == 3
        assert parallel_state.get_tensor_model_parallel_world_size() == 32
        assert parallel_state.get_pp_group().is_last_rank
    assert parallel_state._TP is before


def test_groups_come_back_after_an_error(config):
    before = parallel_state._EP
    with pytest.raises(KeyError), fake_tensor_rank(config, 0):
        raise KeyError
    assert parallel_state._EP is before


def test_the_same_config_builds_twice_without_memory(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = make_vllm_config(str(folder), tensor_size=2, dtype="float32")
    for rank in range(2):
        with fake_tensor_rank(config, rank):
            parameters = dict(build_meta_model(config).named_parameters())
        assert all(parameter.is_meta for parameter in parameters.values())
        assert parameters["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 32)


def test_a_model_beside_a_running_one_leaves_its_settings_alone(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = make_vllm_config(str(folder), tensor_size=2, dtype="float32")
    with fake_tensor_rank(config, 1):
        running = build_meta_model(config)
        layers = dict(config.compilation_config.static_forward_context)
        beside = build_meta_copy(config)
    assert config.compilation_config.static_forward_context == layers
    assert all(parameter.is_meta for parameter in beside.parameters())
    shapes = {name: parameter.shape for name, parameter in running.named_parameters()}
    assert {name: p.shape for name, p in beside.named_parameters()} == shapes
    assert layers


SENTINEL = -12345.0
ODD_VOCAB = {"vocab_size": 61, "num_hidden_layers": 2, "head_dim": 32}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tied": True, "hidden_size": 128},
    "qwen3": {"tied": True},
    "qwen3 untied": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_moe tied": {"tied": True},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a model of MODELS once."""
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name.replace(" ", "_"))
            made[name] = make_tiny_model(name.split()[0], path, **(ODD_VOCAB | MODELS[name]))
        return made[name]

    return folder


def loaded_by_vllm(folder, tensors, tensor_size):
    """Parameters of every tensor rank as vLLM's loader leaves them."""
    config = make_vllm_config(str(folder), tensor_size=tensor_size, dtype="float32")
    for rank in range(tensor_size):
        with fake_tensor_rank(config, rank):
            model = build_meta_model(config, "cpu")
            for parameter in model.parameters():
                parameter.data.fill_(SENTINEL)
            model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            yield dict(model.named_parameters())


def assembled(shard, tensors):
    """The parameter put together from its blocks; padding is zero."""
    value = torch.zeros(shard.shape)
    for block in shard.blocks:
        part = tensors[block.hf_name][block.hf_rect.slices]
        value[block.local_rect.slices] = part.reshape(block.local_rect.shape)
    return value


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_traced_rectangles_make_what_vllm_loads(folder_of, name, tensor_size):
    folder = folder_of(name)
    tensors = load_file(folder / "model.safetensors")
    layouts = trace_engine_layouts(folder, tensor_size, "float32")
    assert len(layouts) == tensor_size
    models = loaded_by_vllm(folder, tensors, tensor_size)
    for layout, parameters in zip(layouts, models, strict=True):
        assert [shard.name for shard in layout] == list(parameters)
        for shard in layout:
            assert torch.equal(assembled(shard, tensors), parameters[shard.name]), shard.name


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_layouts_that_plans_are_tested_with_are_the_traced_ones(folder_of, name, tensor_size):
    shape = ModelShape.from_folder(folder_of(name))
    for rank, layout in enumerate(trace_engine_layouts(folder_of(name), tensor_size, "float32")):
        expected = rollout_layout(shape, rank, tensor_size)
        assert comparable(layout) == comparable(expected)


def comparable(layout):
    return {shard.name: (shard.shape, frozenset(shard.blocks)) for shard in layout}


def test_a_traced_engine_is_served_by_a_plan(folder_of):
    shape = ModelShape.from_folder(folder_of("qwen3_moe"))
    shapes = hf_shapes(shape)
    sources = [
        megatron_layout(shape, parallel_rank)
        for parallel_rank in all_parallel_ranks(tensor=2, expert=2)
    ]
    params = trace_engine_layouts(folder_of("qwen3_moe"), 4, "float32", hf_shapes=shapes)
    parallel_ranks = [RankLocation(node) for node in range(6)]
    plan = plan_transfer(sources, params, parallel_ranks, "float32", names=list(shapes))
    tensors = make_tensors(shapes)
    for layout, got in zip(params, execute(plan, sources, params, tensors), strict=True):
        for parameter, expected in filled(layout, tensors).items():
            assert (got[parameter] == expected).all()


def test_more_tensor_ranks_than_key_value_heads(folder_of):
    layouts = trace_engine_layouts(folder_of("qwen3"), 4, "bfloat16")
    keys = [
        block.hf_rect
        for layout in layouts
        for block in next(s for s in layout if "layers.0.self_attn.qkv" in s.name).blocks
        if block.hf_name.endswith("k_proj.weight")
    ]
    first, second = Rect((0, 0), (32, 32)), Rect((32, 0), (64, 32))
    assert keys == [first, first, second, second]


def test_a_vocabulary_shard_has_padding_and_a_tied_head_no_place(folder_of):
    last = trace_engine_layouts(folder_of("qwen3"), 4, "float32")[-1]
    (embedding,) = [shard for shard in last if shard.shape == (16, 32)]
    assert embedding.name == "model.embed_tokens.weight"
    (block,) = embedding.blocks
    assert (block.hf_rect, block.local_rect) == (
        Rect((48, 0), (61, 32)),
        Rect((0, 0), (13, 32)),
    )


def test_what_vllm_itself_would_load_wrongly_without_a_word_is_an_error(tmp_path):
    # vLLM's Qwen2 takes the head's width to be hidden size over heads, whatever config.json says.
    folder = make_tiny_model("qwen2", tmp_path, **(ODD_VOCAB | {"hidden_size": 32}))
    with pytest.raises(ValueError, match=r"3072 of 4096 elements of .*q_proj.weight"):
        trace_engine_layouts(folder, 2, "float32")


def test_missing_and_unknown_tensors_are_named(folder_of):
    folder = folder_of("qwen3 untied")
    shapes = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    lost = "model.layers.1.self_attn.k_proj.weight"
    fewer = {name: shape for name, shape in shapes.items() if name != lost}
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj.*from .*q_proj"):
        trace_engine_layouts(folder, 2, "float32", hf_shapes=fewer)
    swapped = shapes | {lost: shapes["model.layers.1.self_attn.q_proj.weight"]}
    with pytest.raises(ValueError, match=r"k_proj\.weight"):
        trace_engine_layouts(folder, 2, "float32", hf_shapes=swapped)


class Toy(nn.Module):
    """One parameter and a loader that the test writes."""

    def __init__(self, loader):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), 7.0), requires_grad=False)
        self.loader = loader

    def load_weights(self, weights):
        for _, tensor in weights:
            self.loader(self.weight, tensor)


def test_a_model_keeps_its_values():
    model = Toy(lambda weight, loaded: weight.data.copy_(loaded))
    (shard,) = trace_model_layout(model, {"w": (4, 3)}, "bfloat16")
    assert shard.blocks[0].hf_rect == Rect.whole((4, 3))
    assert torch.equal(model.weight, torch.full((4, 3), 7.0))


def clear_then_copy(weight, loaded):
    weight.data.zero_()
    weight.data[:3].copy_(loaded[:3])


def test_a_loader_may_clear_all_of_a_parameter_first():
    (shard,) = trace_model_layout(Toy(clear_then_copy), {"w": (4, 3)}, "float32")
    assert [block.local_rect for block in shard.blocks] == [Rect((0, 0), (3, 3))]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda weight, loaded: weight.data[:3].copy_(loaded[:3]), "9 elements of weight"),
        (lambda weight, loaded: None, "0 elements of weight .* no tensor"),
        (
            lambda weight, loaded: [weight.data.copy_(loaded), weight.data[1:].copy_(loaded[1:])],
            "weight holds .* overlap",
        ),
    ],
)
def test_a_parameter_is_written_once_and_whole(loader, message):
    with pytest.raises(ValueError, match=message):
        trace_model_layout(Toy(loader), {"w": (4, 3)}, "float32")

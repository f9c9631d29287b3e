"""The traced rectangles make, bit for bit, the parameters that vLLM's loader fills."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.distributed import parallel_state

from mega_agentrl.errors import InputError
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts, num_elements
from mega_agentrl.generator.weights.loader_trace import (
    as_tensor_rank,
    build_meta_copy,
    build_meta_model,
    make_vllm_config,
    trace_engine_layouts,
    trace_model_layout,
)
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.generator.vision_model import write_vision_model
from tests.reshard.faults import cut
from tests.reshard.model_cuts import ranks_by_row
from tests.reshard.rollout_cuts import engine_layouts
from tests.tiny_models import make_tiny_model
from tests.vision_models import VISION_FAMILIES

pytestmark = pytest.mark.usefixtures("inspect_models_in_process")


@pytest.fixture
def config(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    return make_vllm_config(str(folder), tensor_size=2, dtype="float32")


def test_model_code_sees_the_fake_rank_until_the_block_ends_even_by_an_error(config):
    before = parallel_state._TP, parallel_state._EP
    with pytest.raises(KeyError), as_tensor_rank(config, 1):
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        assert parallel_state.get_pp_group().is_last_rank
        raise KeyError
    assert (parallel_state._TP, parallel_state._EP) == before


def test_a_copy_of_a_running_model_leaves_its_settings_alone(config):
    with as_tensor_rank(config, 1):
        running = build_meta_model(config)
        layers = dict(config.compilation_config.static_forward_context)
        copied = build_meta_copy(config)
    assert layers and config.compilation_config.static_forward_context == layers
    assert all(parameter.is_meta for parameter in copied.parameters())
    shapes = {name: parameter.shape for name, parameter in running.named_parameters()}
    assert {name: p.shape for name, p in copied.named_parameters()} == shapes


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


QUICK_MODELS = {("qwen3", 1), ("qwen3 untied", 2), ("qwen3_moe", 4)}
"""Models and numbers of tensor ranks that `make test` compares."""


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
        with as_tensor_rank(config, rank):
            model = build_meta_model(config, "cpu")
            for parameter in model.parameters():
                parameter.data.fill_(SENTINEL)
            model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            yield dict(model.named_parameters())


@pytest.mark.parametrize(
    ("name", "tensor_size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK_MODELS else pytest.mark.extended)
        for name in MODELS
        for size in (1, 2, 4)
    ],
)
def test_traced_rectangles_make_what_vllm_loads(folder_of, name, tensor_size):
    """They also equal the layouts by hand that plans are tested with."""
    folder = folder_of(name)
    layouts = trace_engine_layouts(folder, tensor_size, "float32")
    by_hand = engine_layouts(ModelShape.from_folder(folder), tensor_size)
    assert list(map(comparable, layouts)) == list(map(comparable, by_hand))
    assert [[shard.name for shard in layout] for layout in layouts] == [
        [shard.name for shard in layout] for layout in by_hand
    ]
    check_against_vllm(folder, layouts)


@pytest.mark.extended
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_towers_are_traced_like_decoders(tmp_path, family, tensor_size):
    """They also equal the layouts that estimates are made with."""
    folder = write_vision_model(family, tmp_path)
    layouts = trace_engine_layouts(folder, tensor_size, "float32")
    assert any("visual" in shard.name for shard in layouts[0])
    check_against_vllm(folder, layouts)
    shape = ModelShape.from_folder(folder)
    estimated = [engine_shard_layouts(shape, rank, tensor_size) for rank in range(tensor_size)]
    assert ranks_by_row(layouts) == ranks_by_row(estimated)
    assert list(map(num_elements, layouts)) == list(map(num_elements, estimated))


def check_against_vllm(folder, layouts):
    """Check that layouts cut from the folder's tensors the parameters that vLLM's loader leaves."""
    tensors = load_file(folder / "model.safetensors")
    models = loaded_by_vllm(folder, tensors, len(layouts))
    for layout, parameters in zip(layouts, models, strict=True):
        assert {shard.name for shard in layout} == set(parameters)
        for param, values in cut(layout, tensors).items():
            assert torch.equal(values, parameters[param]), param


def comparable(layout):
    return {shard.name: (shard.shape, frozenset(shard.blocks)) for shard in layout}


@pytest.mark.extended
def test_a_tensor_that_vllm_would_load_only_in_part_is_an_error(tmp_path):
    # vLLM's Qwen2 takes the head's width to be hidden size over heads, whatever config.json says.
    folder = make_tiny_model("qwen2", tmp_path, **(ODD_VOCAB | {"hidden_size": 32}))
    with pytest.raises(InputError) as caught:
        trace_engine_layouts(folder, 2, "float32")
    assert "q_proj.weight" in caught.value.name
    assert caught.value.got == 3072


def test_missing_and_unknown_tensors_are_named(folder_of):
    folder = folder_of("qwen3 untied")
    shapes = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    lost = "model.layers.1.self_attn.k_proj.weight"
    fewer = {name: shape for name, shape in shapes.items() if name != lost}
    with pytest.raises(InputError) as caught:
        trace_engine_layouts(folder, 2, "float32", hf_shapes=fewer)
    assert caught.value.name == "model.layers.1.self_attn.qkv_proj.weight"
    assert "model.layers.1.self_attn.q_proj.weight" in caught.value.got
    swapped = shapes | {lost: shapes["model.layers.1.self_attn.q_proj.weight"]}
    with pytest.raises(InputError) as caught:
        trace_engine_layouts(folder, 2, "float32", hf_shapes=swapped)
    assert lost in caught.value.name


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
    ("loader", "got"),
    [
        (lambda weight, loaded: weight.data[:3].copy_(loaded[:3]), "9 loaded elements of (4, 3)"),
        (lambda weight, loaded: None, "0 loaded elements of (4, 3), from no tensor"),
        (
            lambda weight, loaded: [weight.data.copy_(loaded), weight.data[1:].copy_(loaded[1:])],
            str((Rect((0, 0), (4, 3)), Rect((1, 0), (4, 3)))),
        ),
    ],
    ids=["in-part", "never", "twice"],
)
def test_a_parameter_is_written_once_and_whole(loader, got):
    with pytest.raises(InputError) as caught:
        trace_model_layout(Toy(loader), {"w": (4, 3)}, "float32")
    assert caught.value.name.endswith("weight")
    assert str(caught.value.got).startswith(got)

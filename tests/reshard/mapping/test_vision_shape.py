"""Vision-language models: what their configs say, names on disk, the cover of any layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.layout import check_cover
from mega_agentrl.reshard.mapping.model_mapping import (
    hf_shapes,
    is_tensor_replicated,
    is_vision_param,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.mapping.rope_config import RopeConfig
from mega_agentrl.reshard.mapping.vision_shape import (
    VisionShape,
    VisionTower,
    vision_tensor_shapes,
)
from tests.estimate.shapes import CONFIGS, released
from tests.reshard.model_cuts import trainer_layouts_of
from tests.vision_models import VISION_FAMILIES, make_vision_model

QWEN2_5 = VisionShape(
    tower=VisionTower.qwen2_5_vl,
    depth=32,
    hidden_size=1280,
    num_heads=16,
    ffn_hidden_size=3420,
    in_channels=3,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    out_hidden_size=3584,
    window_size=112,
    full_attention_blocks=(7, 15, 23, 31),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    return {name: make_vision_model(name, root / name) for name in VISION_FAMILIES}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_names_and_shapes_are_those_of_the_saved_checkpoint(tmp_path, family, tied):
    folder = make_vision_model(family, tmp_path, tied=tied)
    saved = load_file(folder / "model.safetensors")
    shape = ModelShape.from_folder(folder)
    assert hf_shapes(shape) == {name: tuple(value.shape) for name, value in saved.items()}
    assert shape.tie_word_embeddings is tied


def test_the_published_qwen2_5_vl_has_the_keys_of_its_decoder_at_the_top():
    shape = released("qwen2.5-vl-7b")
    assert shape.vision == QWEN2_5
    assert shape.rope == RopeConfig(theta=1e6, mrope_section=(16, 24, 24))
    assert (shape.num_layers, shape.head_dim, shape.qkv_bias) == (28, 128, True)
    # A tower of 676,550,144 parameters; the sum is that of the published files.
    sizes = [torch.Size(size).numel() for size in vision_tensor_shapes(shape.vision).values()]
    assert sum(sizes) == 676_550_144
    assert sum(torch.Size(size).numel() for size in hf_shapes(shape).values()) == 8_292_166_656


def test_the_published_qwen3_vl_interleaves_its_axes_and_has_three_deepstack_mergers():
    shape = released("qwen3-vl-8b")
    rope = RopeConfig(theta=5e6, mrope_section=(24, 20, 20), mrope_interleaved=True)
    assert shape.rope == rope
    assert shape.vision.deepstack_blocks == (8, 16, 24)
    assert (shape.head_dim, shape.qk_norm, shape.qkv_bias) == (128, True, False)
    assert sum(torch.Size(size).numel() for size in hf_shapes(shape).values()) == 8_767_123_696


REFUSED = {
    "other sections": ("qwen2.5-vl-7b", ("rope_scaling", "mrope_section"), [16, 24, 20]),
    "no sections": ("qwen3-vl-8b", ("text_config", "rope_scaling", "mrope_section"), None),
    "not interleaved": ("qwen3-vl-8b", ("text_config", "rope_scaling", "mrope_interleaved"), False),
    "no theta": ("qwen2.5-vl-7b", ("rope_theta",), None),
    "another width": ("qwen2.5-vl-7b", ("vision_config", "out_hidden_size"), 4096),
    "another activation": ("qwen3-vl-8b", ("vision_config", "hidden_act"), "silu"),
    "no tower": ("qwen3-vl-8b", ("vision_config",), None),
    "a block too many": ("qwen2.5-vl-7b", ("vision_config", "fullatt_block_indexes"), [32]),
    "no patch size": ("qwen3-vl-8b", ("vision_config", "patch_size"), None),
    "another head": ("qwen2.5-vl-7b", ("head_dim",), 64),
    "a sliding window": ("qwen2.5-vl-7b", ("use_sliding_window",), True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_without_a_mapping_is_refused(tmp_path, case):
    name, keys, value = REFUSED[case]
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    inner = config
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if case == "a sliding window":
        config["max_window_layers"] = 10
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        ModelShape.from_folder(tmp_path)
    assert caught.value.name.startswith(str(tmp_path / "config.json"))


def test_a_text_model_with_sections_of_axes_is_refused(tmp_path):
    config = json.loads((CONFIGS / "qwen2.5-vl-7b.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        ModelShape.from_folder(tmp_path)
    assert caught.value.got == "mrope"


CUTS = {
    "one": {},
    "tensor, pipeline, data": {"tensor": 2, "pipeline": 2, "data": 2},
    "virtual pipeline": {"pipeline": 2, "virtual": 2},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_vision_tower_is_whole_on_the_tensor_ranks_of_the_first_stage(folders, family, cut):
    shape = ModelShape.from_folder(folders[family])
    layouts = trainer_layouts_of(shape, **CUTS[cut])
    names = set(vision_tensor_shapes(shape.vision))
    for number, layout in enumerate(layouts):
        towers = [shard for shard in layout if is_vision_param(shard.name)]
        is_first = number < len(layouts) // CUTS[cut].get("pipeline", 1)
        prefix = "chunk0.vision." if "virtual" in CUTS[cut] else "vision."
        assert {shard.name.removeprefix(prefix) for shard in towers} == (
            names if is_first else set()
        )
        for shard in towers:
            assert is_tensor_replicated(shape, shard.name)
            (block,) = shard.blocks
            assert block.hf_rect == block.local_rect
    distinct = {
        (block.hf_name, block.hf_rect): shard
        for layout in layouts
        for shard in layout
        for block in shard.blocks
    }
    held = {id(shard): shard for shard in distinct.values()}
    check_cover(hf_shapes(shape), held.values(), owner="policy")


def test_the_first_stage_must_have_all_layers_with_features():
    shape = released("qwen3-vl-8b")
    megatron_layout(shape, ModelParallelRank(pipeline_size=12))
    with pytest.raises(ConfigError) as caught:
        megatron_layout(shape, ModelParallelRank(pipeline_size=18))
    assert caught.value.got == 18


def test_a_scalar_head_on_a_model_that_sees_images_is_refused():
    shape = released("qwen2.5-vl-7b")
    assert shape.head is HeadKind.vocab
    with pytest.raises(InputError) as caught:
        shape.with_scalar_head()
    assert caught.value.name == "architecture"


RENAMED = {
    "nested": ("model.language_model.", "model.visual."),
    "flat": ("model.", "visual."),
    "in memory of vLLM": ("language_model.model.", "visual."),
}


@pytest.mark.parametrize("names", RENAMED)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_tensors_are_found_under_the_names_of_any_version(tmp_path, folders, family, names):
    folder, (decoder, tower) = folders[family], RENAMED[names]
    shape = ModelShape.from_folder(folder)
    saved = load_file(folder / "model.safetensors")
    own = shape.family.hf_decoder_prefix, shape.family.hf_vision_prefix

    def renamed(name):
        if name.startswith(own[1]):
            return tower + name.removeprefix(own[1])
        return name if name == "lm_head.weight" else decoder + name.removeprefix(own[0])

    save_file(
        {renamed(name): value for name, value in saved.items()}, tmp_path / "model.safetensors"
    )
    layout = megatron_layout(shape, ModelParallelRank())
    parameters = {shard.name: torch.full(shard.shape, torch.nan) for shard in layout}
    read_shards(tmp_path, layout, hf_shapes(shape), parameters)
    for shard in layout:
        for block in shard.blocks:
            expected = saved[block.hf_name][block.hf_rect.slices]
            assert torch.equal(parameters[shard.name][block.local_rect.slices], expected)

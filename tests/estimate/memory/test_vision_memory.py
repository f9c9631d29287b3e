"""The memory of a vision tower: what the actor allocates, what autograd saves, recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega_agentrl.config.enums import Recompute
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.memory.engine import num_engine_rank_parameters
from mega_agentrl.estimate.memory.model_state import estimate_model_state, num_parameters
from mega_agentrl.estimate.memory.policy import estimate_policy_memory
from mega_agentrl.estimate.memory.vision import (
    max_image_tokens,
    vision_activation_bytes,
    vision_block_bytes_per_patch,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.configs import configured
from tests.estimate.rank_jobs import held_bytes
from tests.estimate.shapes import released
from tests.vision_models import VISION_FAMILIES, make_vision_model

LAYOUTS = {
    "bfloat16, data": ("bfloat16", {"data": 2}, False),
    "bfloat16, pipeline, frozen": ("bfloat16", {"pipeline": 2}, True),
    "float32, tensor, frozen": ("float32", {"tensor": 2}, True),
    "float32, plain optimizer": (
        "float32", {"data": 2, "distributed_optimizer": False}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_estimate_is_what_the_actor_allocates(rank_pool, tmp_path, family, case):
    dtype, cut, frozen = LAYOUTS[case]
    folder, layout = make_vision_model(family, tmp_path), ParallelConfig(**cut)
    found = rank_pool.run(held_bytes, layout.world_size, str(folder), layout, dtype, frozen)
    for (stage, replica, _), got, copied in found:
        expected = estimate_model_state(
            ModelShape.from_folder(folder),
            layout,
            stage,
            item_bytes=2 if dtype == "bfloat16" else 4,
            freeze_vision=frozen,
            replica=replica,
        )
        assert (expected.weights, expected.gradients, expected.optimizer) == got
        assert copied <= expected.checkpoint


def saved_bytes(vision, grid):
    """Return the bytes that autograd saves in one pass of the tower, without its weights."""
    from mega_agentrl.actor.model.vision_tower import build_vision_tower

    tower = build_vision_tower(vision, torch.bfloat16)
    skipped = {value.untyped_storage().data_ptr() for value in tower.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            storages[storage.data_ptr()] = storage
        return tensor

    for value in tower.parameters():
        torch.nn.init.normal_(value, std=0.02)
    patches = torch.randn(grid[0] * grid[1] * grid[2], vision.patch_dim)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = tower(patches, grid_thw=torch.tensor([grid]))
    assert output.pooler_output.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_a_block_saves_as_many_bytes_as_are_estimated(name):
    # The proportions of the released towers at an eighth of their width.
    full = released(name).vision
    small = replace(
        full,
        hidden_size=full.hidden_size // 8,
        ffn_hidden_size=full.ffn_hidden_size // 8,
        num_heads=2,
        out_hidden_size=64,
        full_attention_blocks=full.full_attention_blocks and (1,),
        deepstack_blocks=(),
        num_position_embeddings=full.num_position_embeddings and 64,
    )
    grid = (1, 8, 16)
    few, more = (saved_bytes(replace(small, depth=depth), grid) for depth in (2, 4))
    got = (more - few) / 2 / 128
    assert vision_block_bytes_per_patch(small, 2) == pytest.approx(got, rel=0.1)


def test_recomputation_and_freezing_keep_less():
    vision = released("qwen2.5-vl-7b").vision

    def kept(recompute, *, frozen=False):
        return vision_activation_bytes(vision, 1000, 2, recompute=recompute, frozen=frozen)

    assert kept(Recompute.none) == kept(Recompute.selective) > 8 * kept(Recompute.full)
    assert kept(Recompute.full) > kept(Recompute.none, frozen=True) == 1000 * 3584 * 2


def test_images_fill_the_prompts_of_a_micro_batch():
    config = configured(prompt=2048, response=6144, tokens=16384)
    vision = released("qwen2.5-vl-7b").vision
    assert max_image_tokens(config, vision, 16384) == 2 * 2048
    assert max_image_tokens(config, vision, 1000) == 1000
    config.data.max_pixels = 512 * 28 * 28
    config.parallel.tensor, config.parallel.sequence_parallel = 4, True
    assert max_image_tokens(config, vision, 16384) == 1024 + 2 * 512
    config.parallel.tensor, config.parallel.sequence_parallel, config.parallel.context = 1, False, 4
    assert max_image_tokens(config, vision, 4096) == 1024 + 4 * 512
    assert max_image_tokens(config, vision, 2048) == 2048, "all images of one row"


def test_only_the_first_stage_has_the_tower():
    shape, device = released("qwen3-vl-8b"), DeviceSpec()
    config = configured(tensor=2, pipeline=2, data=2)
    first, last = estimate_policy_memory(config, shape, device)
    text_only = replace(shape, vision=None)
    assert num_parameters(shape) - num_parameters(text_only) > 500e6
    assert first.vision_activations > 0 == last.vision_activations
    assert first.num_parameters > last.num_parameters
    config.model.freeze_vision = True
    frozen = estimate_policy_memory(config, shape, device)[0]
    assert (frozen.num_parameters, frozen.weights) == pytest.approx(
        (first.num_parameters, first.weights), rel=1e-4
    )
    assert frozen.gradients < first.gradients
    assert frozen.optimizer < first.optimizer


def test_an_engine_rank_holds_the_tower():
    shape = released("qwen2.5-vl-7b")
    assert num_engine_rank_parameters(shape, 1) == pytest.approx(num_parameters(shape), rel=1e-3)

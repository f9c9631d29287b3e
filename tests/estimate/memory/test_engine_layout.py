"""The layout against the one that is tested to be what vLLM's loader does."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts, num_elements
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.shapes import released
from tests.reshard.model_cuts import ranks_by_row
from tests.reshard.rollout_cuts import rollout_layout

MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "reward": ("qwen3_reward", {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_the_shards_that_vllm_loads(name, size, folders):
    shape = ModelShape.from_folder(folders(name))
    ours = [engine_shard_layouts(shape, rank, size) for rank in range(size)]
    theirs = [rollout_layout(shape, rank, size) for rank in range(size)]
    assert list(map(num_elements, ours)) == list(map(num_elements, theirs)), "padding included"
    assert ranks_by_row(ours) == ranks_by_row(theirs)
    assert {shard.name for shard in ours[0]} == set(hf_shapes(shape))


def test_more_ranks_than_key_heads_share_one():
    shape = released("qwen3-235b-a22b", num_hidden_layers=1)
    third, fourth = (engine_shard_layouts(shape, rank, 8) for rank in (2, 3))
    (one,) = [shard for shard in third if shard.name.endswith("k_proj.weight")]
    assert one in fourth
    assert one.shape == (128, 4096)

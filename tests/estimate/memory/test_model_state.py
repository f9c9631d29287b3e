"""Predicted bytes against what the actor allocates, over grids of layouts."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.model_state import ModelState, estimate_model_state
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.rank_jobs import held_bytes
from tests.estimate.shapes import released
from tests.tiny_models import make_tiny_model

MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
}
CASES = [
    ("llama", "bfloat16", {"tensor": 2}),
    ("qwen3", "bfloat16", {"data": 2}),
    ("qwen3", "float32", {"data": 2}),
    ("qwen3", "bfloat16", {"context": 2, "distributed_optimizer": False}),
    ("qwen3", "float32", {"data": 2, "distributed_optimizer": False}),
    ("qwen2, tied", "bfloat16", {"pipeline": 2, "data": 2}),
    ("qwen2, tied", "bfloat16", {"pipeline": 2, "virtual_pipeline": 2}),
    ("moe", "bfloat16", {"tensor": 2, "sequence_parallel": True, "expert": 2}),
    ("moe", "bfloat16", {"tensor": 2, "data": 2, "sequence_parallel": True, "expert": 2}),
    ("moe", "bfloat16", {"data": 4, "expert": 2, "expert_tensor": 1}),
    ("moe", "float32", {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "expert_tensor": 2}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            architecture, changes = MODELS[name]
            made[name] = make_tiny_model(architecture, tmp_path_factory.mktemp("m"), **changes)
        return made[name]

    return get


@pytest.mark.parametrize(("name", "dtype", "cut"), CASES)
def test_it_is_what_the_actor_allocates(name, dtype, cut, folders, rank_pool):
    layout = ParallelConfig(**cut)
    shape = ModelShape.from_folder(folders(name))
    item_bytes = 2 if dtype == "bfloat16" else 4
    found = rank_pool.run(held_bytes, layout.world_size, str(folders(name)), layout, dtype)
    assert len(found) == layout.world_size
    for (stage, replica, expert_replica), got in found:
        expected = estimate_model_state(
            shape,
            layout,
            stage,
            item_bytes=item_bytes,
            replica=replica,
            expert_replica=expert_replica,
        )
        assert (expected.weights, expected.gradients, expected.optimizer) == got
        most = estimate_model_state(shape, layout, stage, item_bytes=item_bytes)
        assert most.optimizer >= expected.optimizer


def test_a_released_model_by_hand():
    """Qwen3-32B over 8 x 4: an eighth of the matrices, optimizer over 4 data ranks."""
    shape = released("qwen3-32b")
    state = estimate_model_state(shape, ParallelConfig(tensor=8, data=4), 0)
    assert state.num_parameters == pytest.approx(32_762_123_264 / 8, rel=0.001)
    assert state.weights == pytest.approx(2 * state.num_parameters, rel=1e-4)
    assert state.gradients == 2 * state.weights
    assert state.optimizer == pytest.approx(12 * state.num_parameters / 4, rel=1e-4)
    assert state.largest_parameter == 151936 // 8 * 5120 * 2


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data", "context"])
def test_more_ranks_hold_less_each(axis):
    shape = released("qwen3-32b")

    def total(size):
        state = estimate_model_state(shape, ParallelConfig(**{axis: size}), 0)
        return state.weights + state.gradients + state.optimizer

    assert total(1) > total(2) > total(4)


def test_a_host_copy_is_rounded_up_like_pinned_memory():
    def state(weights):
        return ModelState(
            num_parameters=0, largest_parameter=0, weights=weights, gradients=0, optimizer=0
        )

    assert state(2**28 + 5).host_copy_bytes == 2**28 + 8
    assert state(2**29).host_copy_bytes == 2**29

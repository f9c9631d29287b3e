"""Predicted parameters, buffers and bytes against released models and what the actor allocates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.model_state import (
    FlatBuffer,
    ModelState,
    RankParameter,
    estimate_model_state,
    flat_buffers,
    num_active_parameters,
    num_parameters,
    rank_parameters,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.rank_jobs import held_bytes
from tests.estimate.shapes import released

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
QUICK = [CASES[number] for number in (0, 1, 4, 6, 7)]
"""A case for each axis, both dtypes, experts, and either optimizer."""


@pytest.mark.parametrize(
    ("name", "dtype", "cut"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.extended) for case in CASES],
)
def test_the_estimate_is_what_the_actor_allocates(name, dtype, cut, folders, rank_pool):
    layout = ParallelConfig(**cut)
    shape = ModelShape.from_folder(folders(name))
    item_bytes = 2 if dtype == "bfloat16" else 4
    found = rank_pool.run(held_bytes, layout.world_size, str(folders(name)), layout, dtype)
    assert len(found) == layout.world_size
    for (stage, replica, expert_replica), got, copied in found:
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
        assert copied <= most.checkpoint
    # Of the first stage, because the last one may have an embedding that the first one writes.
    copies = [copied for (stage, *_), _, copied in found if not stage]
    first_stage = estimate_model_state(shape, layout, 0, item_bytes=item_bytes)
    assert max(copies) >= 0.75 * first_stage.checkpoint


def test_a_released_model_has_the_state_worked_out_by_hand():
    """Qwen3-32B over 8 x 4: an eighth of the matrices, optimizer over 4 data ranks."""
    shape = released("qwen3-32b")
    state = estimate_model_state(shape, ParallelConfig(tensor=8, data=4), 0)
    assert state.num_parameters == pytest.approx(32_762_123_264 / 8, rel=0.001)
    assert state.weights == pytest.approx(2 * state.num_parameters, rel=1e-4)
    assert state.gradients == 2 * state.weights
    assert state.optimizer == pytest.approx(12 * state.num_parameters / 4, rel=1e-4)
    assert state.largest_parameter == 151936 // 8 * 5120 * 2
    # Of the weights a rank writes its share, but whole matrices.
    assert state.checkpoint == pytest.approx(state.optimizer + state.weights / 4, rel=0.04)


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
            num_parameters=0,
            largest_parameter=0,
            weights=weights,
            gradients=0,
            optimizer=0,
            reference_weights=weights,
            merged_weights=0,
            checkpoint=0,
        )

    assert state(2**28 + 5).host_copy_bytes == 2**28 + 8
    assert state(2**29).host_copy_bytes == 2**29


TOTALS = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_released_models_have_their_number_of_parameters(name, total):
    assert num_parameters(released(name)) == total


def test_a_sparse_model_has_fewer_active_parameters_and_a_dense_one_has_not():
    assert round(num_active_parameters(released("qwen3-235b-a22b")) / 1e9, 1) == 22.2
    dense = released("qwen3-32b")
    assert num_active_parameters(dense) == num_parameters(dense)


def test_all_stages_together_have_the_parameters_of_the_model():
    shape = released("qwen2.5-72b")
    layout = ParallelConfig(tensor=8, pipeline=4, virtual_pipeline=2)
    held = [rank_parameters(shape, layout, stage) for stage in range(4)]
    norms = (2 * shape.num_layers + 1) * shape.hidden_size  # on every tensor rank
    total = sum(parameter.numel for stage in held for parameter in stage)
    assert 8 * total == num_parameters(shape) + 7 * norms
    assert {parameter.chunk for parameter in held[1]} == {0, 1}


def test_experts_are_sharded_over_expert_ranks():
    shape = released("qwen3-30b-a3b")
    layout = ParallelConfig(tensor=2, data=8, expert=16)
    experts = [p for p in rank_parameters(shape, layout, 0) if p.is_expert]
    assert sum(p.numel for p in experts) * 16 == 48 * 128 * 3 * 2048 * 768
    half = ParallelConfig(tensor=2, data=8, expert=8, expert_tensor=2)
    assert sum(p.numel for p in rank_parameters(shape, half, 0)) == sum(
        p.numel for p in rank_parameters(shape, layout, 0)
    )


def test_a_tied_embedding_is_shared_by_two_stages_only():
    shape = released("qwen3-4b")
    rows = shape.vocab_size * shape.hidden_size

    def shared(pipeline, stage):
        parameters = rank_parameters(shape, ParallelConfig(pipeline=pipeline), stage)
        return [p.numel for p in parameters if p.is_shared_embedding]

    assert shared(1, 0) == []
    assert [shared(3, stage) for stage in range(3)] == [[rows], [], [rows]]


def test_a_size_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError):  # 28 heads
        rank_parameters(released("qwen2.5-7b"), ParallelConfig(tensor=8), 0)


def dense(numel, *, chunk=0, shared=False):
    return RankParameter(chunk, numel, False, shared)


def test_tensors_are_padded_to_128_elements_and_to_the_data_ranks():
    """Last first: 100 at 0, 70 at 128, then up to 256: two halves of 128."""
    assert flat_buffers([dense(70), dense(100)], ParallelConfig(data=2)) == [
        FlatBuffer(False, 256, (100, 70))
    ]


def test_a_shared_embedding_is_a_bucket_of_its_own():
    parameters = [dense(200, shared=True), dense(100)]
    assert flat_buffers(parameters, ParallelConfig(data=2)) == [
        FlatBuffer(False, 128 + 256, (64 + 128, 36 + 72))
    ]


def test_without_the_distributed_optimizer_nothing_is_padded_or_sharded():
    layout = ParallelConfig(data=2, distributed_optimizer=False)
    assert flat_buffers([dense(70), dense(100)], layout) == [FlatBuffer(False, 170, (170, 170))]


def test_chunks_and_experts_lie_apart_and_experts_have_fewer_replicas():
    layout = ParallelConfig(tensor=2, data=4, context=2, expert=8)
    parameters = [dense(128), RankParameter(0, 256, True, False), dense(128, chunk=1)]
    found = flat_buffers(parameters, layout)
    assert [(buffer.is_expert, buffer.numel, len(buffer.owned_by_replica)) for buffer in found] == [
        (False, 128, 8),
        (True, 256, 2),
        (False, 128, 8),
    ]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 6))
def test_every_element_is_stepped_by_one_replica(sizes, num_replicas):
    (buffer,) = flat_buffers([dense(size) for size in sizes], ParallelConfig(data=num_replicas))
    assert sum(buffer.owned_by_replica) == sum(sizes)
    assert max(buffer.owned_by_replica) <= buffer.numel // num_replicas
    assert sum(sizes) <= buffer.numel < sum(sizes) + 64 * len(sizes) + 128 * num_replicas

"""Parameters counted against the released models, and over the ranks of a cut."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.rank_parameters import (
    num_active_parameters,
    num_parameters,
    rank_parameters,
)
from tests.estimate.shapes import released

TOTALS = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_the_released_models_have_as_many(name, total):
    assert num_parameters(released(name)) == total


def test_a_token_goes_through_some_of_the_experts():
    assert round(num_active_parameters(released("qwen3-235b-a22b")) / 1e9, 1) == 22.2
    dense = released("qwen3-32b")
    assert num_active_parameters(dense) == num_parameters(dense)


def test_the_stages_together_hold_the_model():
    shape = released("qwen2.5-72b")
    layout = ParallelConfig(tensor=8, pipeline=4, virtual_pipeline=2)
    held = [rank_parameters(shape, layout, stage) for stage in range(4)]
    norms = (2 * shape.num_layers + 1) * shape.hidden_size  # on every tensor rank
    total = sum(parameter.numel for stage in held for parameter in stage)
    assert 8 * total == num_parameters(shape) + 7 * norms
    assert {parameter.chunk for parameter in held[1]} == {0, 1}


def test_experts_are_cut_over_their_own_ranks():
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


def test_a_cut_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="28"):
        rank_parameters(released("qwen2.5-7b"), ParallelConfig(tensor=8), 0)

"""A rank's place: bounds, names and which chunk has the ends of the model."""

import pytest

from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank


def test_a_single_rank_holds_both_ends_and_has_plain_names():
    parallel_rank = ModelParallelRank()
    assert parallel_rank.param_prefix(0) == ""
    assert parallel_rank.holds_embedding(0)
    assert parallel_rank.holds_output_layer(0)


def test_only_one_chunk_of_one_rank_holds_each_end():
    parallel_ranks = [
        ModelParallelRank(pipeline_rank=rank, pipeline_size=3, virtual_size=2, tensor_size=2)
        for rank in range(3)
    ]
    ends = [
        (rank, chunk, parallel_rank.holds_embedding(chunk), parallel_rank.holds_output_layer(chunk))
        for rank, parallel_rank in enumerate(parallel_ranks)
        for chunk in range(2)
    ]
    assert [end[:2] for end in ends if end[2]] == [(0, 0)]
    assert [end[:2] for end in ends if end[3]] == [(2, 1)]
    assert [parallel_ranks[0].param_prefix(chunk) for chunk in range(2)] == ["chunk0.", "chunk1."]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "expert_tensor"])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_size_is_named(axis, rank):
    with pytest.raises(ValueError, match=rf"{axis}_rank={rank}: expected 0..1"):
        ModelParallelRank(**{f"{axis}_rank": rank, f"{axis}_size": 2})


def test_there_is_at_least_one_chunk():
    with pytest.raises(ValueError, match="virtual_size=0"):
        ModelParallelRank(virtual_size=0)

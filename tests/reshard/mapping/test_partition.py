"""Which chunks of the model a rank holds, and ranks that do not exist."""

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.partition import ModelParallelRank


def test_a_single_rank_holds_both_ends_and_has_plain_names():
    rank = ModelParallelRank()
    assert rank.param_prefix(0) == ""
    assert rank.holds_embedding(0)
    assert rank.holds_output_layer(0)


def test_only_one_chunk_of_one_rank_holds_each_end():
    ranks = [
        ModelParallelRank(pipeline_rank=rank, pipeline_size=3, virtual_size=2, tensor_size=2)
        for rank in range(3)
    ]
    chunks = [(rank, chunk) for rank in range(3) for chunk in range(2)]
    assert [at for at in chunks if ranks[at[0]].holds_embedding(at[1])] == [(0, 0)]
    assert [at for at in chunks if ranks[at[0]].holds_output_layer(at[1])] == [(2, 1)]
    assert [ranks[0].param_prefix(chunk) for chunk in range(2)] == ["chunk0.", "chunk1."]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "expert_tensor"])
def test_a_rank_outside_its_size_is_named(axis):
    for rank in (-1, 2):
        with pytest.raises(InputError) as caught:
            ModelParallelRank(**{f"{axis}_rank": rank, f"{axis}_size": 2})
        assert (caught.value.name, caught.value.got) == (f"{axis}_rank", rank)


def test_a_rank_has_at_least_one_chunk():
    with pytest.raises(InputError) as caught:
        ModelParallelRank(virtual_size=0)
    assert (caught.value.name, caught.value.got) == ("virtual_size", 0)

"""A rank's place: bounds, names and which chunk has the ends of the model."""

import pytest

from mega_agentrl.reshard.place import Place


def test_a_single_rank_holds_both_ends_and_has_plain_names():
    place = Place()
    assert place.prefix(0) == ""
    assert place.holds_embedding(0)
    assert place.holds_head(0)


def test_only_one_chunk_of_one_rank_holds_each_end():
    places = [
        Place(pipeline_rank=rank, pipeline_size=3, virtual_size=2, tensor_size=2)
        for rank in range(3)
    ]
    ends = [
        (rank, chunk, place.holds_embedding(chunk), place.holds_head(chunk))
        for rank, place in enumerate(places)
        for chunk in range(2)
    ]
    assert [end[:2] for end in ends if end[2]] == [(0, 0)]
    assert [end[:2] for end in ends if end[3]] == [(2, 1)]
    assert [places[0].prefix(chunk) for chunk in range(2)] == ["chunk0.", "chunk1."]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "expert_tensor"])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_size_is_named(axis, rank):
    with pytest.raises(ValueError, match=rf"{axis}_rank={rank}: expected 0..1"):
        Place(**{f"{axis}_rank": rank, f"{axis}_size": 2})


def test_there_is_at_least_one_chunk():
    with pytest.raises(ValueError, match="virtual_size=0"):
        Place(virtual_size=0)

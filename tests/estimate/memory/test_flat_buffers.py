"""The buffers by hand; that they are Megatron's is shown in test_model_state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.flat_buffers import FlatBuffer, flat_buffers
from mega_agentrl.estimate.memory.rank_parameters import RankParameter


def dense(numel, *, chunk=0, shared=False):
    return RankParameter(chunk, numel, False, shared)


def test_padding_by_hand():
    """Last first: 100 at 0, 70 at 128, then up to 256: two halves of 128."""
    assert flat_buffers([dense(70), dense(100)], ParallelConfig(data=2)) == [
        FlatBuffer(False, 256, (100, 70))
    ]


def test_a_shared_embedding_is_a_bucket_of_its_own():
    parameters = [dense(200, shared=True), dense(100)]
    assert flat_buffers(parameters, ParallelConfig(data=2)) == [
        FlatBuffer(False, 128 + 256, (64 + 128, 36 + 72))
    ]


def test_without_the_distributed_optimizer_nothing_is_padded_or_cut():
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

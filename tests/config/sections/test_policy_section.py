"""Sizes of the parallel layout."""

import pytest

from mega_agentrl.config.sections.policy import ParallelConfig


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"tensor": 4}, 4),
        ({"tensor": 4, "expert": 2}, 1),
        ({"tensor": 4, "expert": 2, "expert_tensor": 2}, 2),
        ({"tensor": 4, "expert_tensor": 1}, 1),
    ],
)
def test_expert_tensor_size_defaults_to_tensor_without_expert_parallelism(layout, expected):
    assert ParallelConfig(**layout).expert_tensor_size == expected


def test_expert_parallelism_adds_no_ranks():
    assert ParallelConfig(tensor=2, context=3, data=4, pipeline=5, expert=4).world_size == 120

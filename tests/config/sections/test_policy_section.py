"""Sizes of the parallel layout, and ranges of `parallel.*` and `optim.*`."""

import pytest

from mega_agentrl.config.sections.policy import OptimConfig, ParallelConfig
from tests.config.refusals import refused_setting


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


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (ParallelConfig, "parallel.virtual_pipeline", 0),
        (ParallelConfig, "parallel.expert_tensor", 0),
        (OptimConfig, "optim.min_lr", 1e-2),
        (OptimConfig, "optim.critic_lr", -1.0),
        (OptimConfig, "optim.critic_warmup_steps", -1),
        (OptimConfig, "optim.lr_warmup_steps", -1),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, key, value):
    assert refused_setting(section, **{key.split(".")[1]: value}) == (key, value)

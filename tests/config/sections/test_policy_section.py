import pytest

from mega_agentrl.config.sections.policy import OptimConfig, ParallelConfig


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
    ("section", "values", "message"),
    [
        (
            ParallelConfig,
            {"virtual_pipeline": 0},
            r"parallel.virtual_pipeline=0: expected at least 1",
        ),
        (ParallelConfig, {"expert_tensor": 0}, r"parallel.expert_tensor=0: .*or null"),
        (OptimConfig, {"lr": 1e-3, "min_lr": 1e-2}, r"optim.min_lr=0.01: expected 0 to optim.lr"),
        (OptimConfig, {"critic_lr": -1.0}, r"optim.critic_lr=-1.0: expected at least 0"),
        (OptimConfig, {"critic_warmup_steps": -1}, r"optim.critic_warmup_steps=-1: expected"),
        (OptimConfig, {"lr_warmup_steps": -1}, r"optim.lr_warmup_steps=-1: expected at least 0"),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, values, message):
    with pytest.raises(ValueError, match=message):
        section(**values)

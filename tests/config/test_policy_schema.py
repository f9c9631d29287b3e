import pytest

from mega_agentrl.config.policy_schema import OptimConfig, ParallelConfig


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"tensor": 4}, 4),
        ({"tensor": 4, "expert": 2}, 1),
        ({"tensor": 4, "expert": 2, "expert_tensor": 2}, 2),
        ({"tensor": 4, "expert_tensor": 1}, 1),
    ],
)
def test_one_expert_is_cut_like_the_rest_only_where_experts_are_not_spread(cut, expected):
    assert ParallelConfig(**cut).expert_tensor_size == expected


def test_experts_are_no_further_factor_of_the_number_of_ranks():
    assert ParallelConfig(tensor=2, context=3, data=4, pipeline=5, expert=4).num_ranks == 120


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (ParallelConfig, {"virtual": 0}, r"parallel.virtual=0: expected at least 1"),
        (ParallelConfig, {"expert_tensor": 0}, r"parallel.expert_tensor=0: .*or null"),
        (OptimConfig, {"lr": 1e-3, "min_lr": 1e-2}, r"optim.min_lr=0.01: expected 0 to optim.lr"),
        (OptimConfig, {"critic_lr": -1.0}, r"optim.critic_lr=-1.0: expected at least 0"),
        (OptimConfig, {"critic_warmup_steps": -1}, r"optim.critic_warmup_steps=-1: expected"),
        (OptimConfig, {"warmup_steps": -1}, r"optim.warmup_steps=-1: expected at least 0"),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, values, message):
    with pytest.raises(ValueError, match=message):
        section(**values)

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.training import optimizer_state
from mega_agentrl.actor.training.optimizer import AdamOptimizer
from tests.actor.training.small_model import SETTINGS, alone, fill, wrap

BF16 = torch.bfloat16
KINDS = ("param", *optimizer_state.MOMENTS)


def build(groups, dtype, distributed, experts=False):
    chunk = wrap(groups, dtype, distributed=distributed, experts=experts)
    optimizer = AdamOptimizer([chunk], groups, SETTINGS, dtype, distributed=distributed)

    def step(number):
        optimizer.zero_grad()
        fill(chunk, groups, number)
        optimizer.step(0.05)

    return chunk, optimizer, step


def saved(chunk, optimizer):
    """Return [(name, first element, values)] of this rank, and the number of steps."""
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    shards = [
        (names[id(parameter)], first, {kind: value.clone() for kind, value in values.items()})
        for parameter, first, values in optimizer.state_shards()
    ]
    return shards, optimizer.num_steps


def restore(chunk, optimizer, shards, num_steps):
    """Merge the saved state of all ranks and write it into the shards of this rank."""
    whole = {
        name: {kind: torch.full((p.numel(),), torch.nan) for kind in KINDS}
        for name, p in chunk.module.named_parameters()
    }
    for name, first, values in shards:
        for kind, value in values.items():
            whole[name][kind][first : first + value.numel()] = value
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    for parameter, first, values in optimizer.state_shards():
        for kind, value in values.items():
            value.copy_(whole[names[id(parameter)]][kind][first : first + value.numel()])
    optimizer.set_num_steps(num_steps)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_run_goes_on_with_and_without_the_distributed_optimizer(dtype, before, after, num_steps):
    with alone() as groups:
        chunk, optimizer, step = build(groups, dtype, before, experts=True)
        for number in range(num_steps):
            step(number)
        shards, steps = saved(chunk, optimizer)
        assert steps == num_steps
        other, resumed, step_other = build(groups, dtype, after, experts=True)
        # Steps of its own, which the loaded state must replace.
        step_other(5)
        other.module.load_state_dict(chunk.module.state_dict())
        restore(other, resumed, shards, steps)
        for number in (2, 3):
            step(number)
            step_other(number)
        assert resumed.num_steps == num_steps + 2
        expected = dict(chunk.module.named_parameters())
        for name, parameter in other.module.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)


def test_every_parameter_has_its_value_and_moments():
    with alone() as groups:
        chunk, optimizer, step = build(groups, torch.float32, distributed=True, experts=True)
        step(0)
        state = {name: (first, values) for name, first, values in saved(chunk, optimizer)[0]}
        assert set(state) == {name for name, _ in chunk.module.named_parameters()}
        for name, parameter in chunk.module.named_parameters():
            first, values = state[name]
            assert (first, set(values)) == (0, set(KINDS))
            assert torch.equal(values["param"], parameter.detach().flatten())
            # After one step the first moment is a part of the clipped gradient, the second of
            # its square.
            gradient = values["exp_avg"] / (1 - SETTINGS.betas[0])
            torch.testing.assert_close(gradient.square(), values["exp_avg_sq"] / 0.1)


def test_writing_into_the_shards_changes_the_state():
    with alone() as groups:
        chunk, optimizer, _ = build(groups, torch.float32, distributed=False)
        for _, _, values in optimizer.state_shards():
            values["param"].fill_(2.0)
            values["exp_avg"].fill_(3.0)
        assert all((parameter == 2.0).all() for parameter in chunk.module.parameters())
        assert all((values["exp_avg"] == 3.0).all() for _, _, values in optimizer.state_shards())


def test_steps_are_counted_per_parameter_after_loading():
    with alone() as groups:
        chunk, optimizer, step = build(groups, torch.float32, distributed=True)
        step(0)
        restore(chunk, optimizer, *saved(chunk, optimizer))
        step(1)
        (part,) = optimizer._chained_optimizers
        assert {state["step"].item() for state in part.optimizer.state.values()} == {2.0}


def test_shards_of_two_ranks_are_merged_and_split_again(rank_pool):
    from tests.actor.training.optimizer_state_jobs import resume  # which imports this module

    for results in rank_pool.run(resume, 2):
        expected = results.pop("uninterrupted")
        assert set(results) == {"distributed", "plain"}
        for parameters in results.values():
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)

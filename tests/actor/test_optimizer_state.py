from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor import optimizer_state
from mega_agentrl.actor.optimizer import PolicyOptimizer
from tests.actor.small_network import SETTINGS, alone, fill, wrap

BF16 = torch.bfloat16
KINDS = ("param", *optimizer_state.MOMENTS)


def build(joined, dtype, distributed, experts=False):
    chunk = wrap(joined, dtype, distributed=distributed, experts=experts)
    optimizer = PolicyOptimizer([chunk], joined, SETTINGS, dtype, distributed=distributed)

    def step(number):
        optimizer.zero_grad()
        fill(chunk, joined, number)
        optimizer.step(0.05)

    return chunk, optimizer, step


def saved(chunk, optimizer):
    """[(name, first element, values)] on this rank, and the number of steps."""
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    kept = [
        (names[id(parameter)], first, {kind: value.clone() for kind, value in values.items()})
        for parameter, first, values in optimizer.shares()
    ]
    return kept, optimizer.num_steps


def restore(chunk, optimizer, kept, num_steps):
    """Write what some ranks saved, put together by elements, into the shares of this rank."""
    whole = {
        name: {kind: torch.full((p.numel(),), torch.nan) for kind in KINDS}
        for name, p in chunk.module.named_parameters()
    }
    for name, first, values in kept:
        for kind, value in values.items():
            whole[name][kind][first : first + value.numel()] = value
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    for parameter, first, values in optimizer.shares():
        for kind, value in values.items():
            value.copy_(whole[names[id(parameter)]][kind][first : first + value.numel()])
    optimizer.resume(num_steps)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_run_goes_on_with_and_without_the_distributed_optimizer(dtype, before, after, num_steps):
    with alone() as joined:
        chunk, optimizer, step = build(joined, dtype, before, experts=True)
        for number in range(num_steps):
            step(number)
        kept, steps = saved(chunk, optimizer)
        assert steps == num_steps
        other, resumed, step_other = build(joined, dtype, after, experts=True)
        # Steps of its own, which the loaded state must replace.
        step_other(5)
        other.module.load_state_dict(chunk.module.state_dict())
        restore(other, resumed, kept, steps)
        for number in (2, 3):
            step(number)
            step_other(number)
        assert resumed.num_steps == num_steps + 2
        expected = dict(chunk.module.named_parameters())
        for name, parameter in other.module.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)


def test_every_parameter_has_its_value_and_moments():
    with alone() as joined:
        chunk, optimizer, step = build(joined, torch.float32, distributed=True, experts=True)
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


def test_what_is_written_into_the_shares_is_the_state():
    with alone() as joined:
        chunk, optimizer, _ = build(joined, torch.float32, distributed=False)
        for _, _, values in optimizer.shares():
            values["param"].fill_(2.0)
            values["exp_avg"].fill_(3.0)
        assert all((parameter == 2.0).all() for parameter in chunk.module.parameters())
        assert all((values["exp_avg"] == 3.0).all() for _, _, values in optimizer.shares())


def test_steps_are_counted_per_parameter_after_loading():
    with alone() as joined:
        chunk, optimizer, step = build(joined, torch.float32, distributed=True)
        step(0)
        restore(chunk, optimizer, *saved(chunk, optimizer))
        step(1)
        (part,) = optimizer._parts
        assert {state["step"].item() for state in part.optimizer.state.values()} == {2.0}


def test_shares_of_two_ranks_make_up_the_whole_and_are_cut_again(rank_pool):
    from tests.actor.optimizer_state_jobs import resume  # which imports this module

    for results in rank_pool.run(resume, 2):
        expected = results.pop("uninterrupted")
        assert set(results) == {"distributed", "plain"}
        for parameters in results.values():
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)

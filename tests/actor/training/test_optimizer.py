"""Steps of the small model against torch's AdamW, and its state saved and restored."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from mega_agentrl.actor.training import optimizer as optimizer_module
from mega_agentrl.actor.training.optimizer import AdamOptimizer
from mega_agentrl.config.checks.library_options import OPTIMIZER
from mega_agentrl.errors import InputError
from mega_agentrl.runtime.free_port import free_ports
from tests.actor.training.optimizer_jobs import (
    CASES,
    KINDS,
    build,
    restore,
    resume,
    saved,
    step_cases,
)
from tests.actor.training.small_model import SETTINGS, SHAPES, Reference, whole, wrap

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def two_ranks(rank_pool):
    """Return, per rank and case, (norm, applied) of each step, parameters and step count."""
    return rank_pool.run(step_cases, 2, free_ports(len(CASES)))


OPTIMIZERS = {
    "float32": (torch.float32, False, False),
    "float32-distributed": (torch.float32, True, True),
    "bf16": (BF16, False, False),
    "bf16-distributed": (BF16, True, True),
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def stepper(request, one_rank):
    """Return (optimizer, chunk, step, dtype) on one rank; `step(number)` takes a step."""
    chunk, optimizer, step = build(one_rank, *request.param)
    return optimizer, chunk, step, request.param[0]


def values(chunk):
    return {name: p.detach().float().clone() for name, p in chunk.module.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_like_one_and_skip_together(two_ranks, case):
    held = {name for rank in two_ranks for name in rank[case][1]}
    assert held == set(SHAPES) - ({"expert"} if "expert" not in case else set())
    dtype = BF16 if "bf16" in case else torch.float32
    reference = Reference([name for name in SHAPES if name in held], dtype)
    norms = [reference.step(number, 0.05 * (number + 1)) for number in range(3)]
    for results, parameters, num_steps in (rank[case] for rank in two_ranks):
        assert [taken for _, taken in results] == [True, False, True, True]
        assert num_steps == 3
        assert not math.isfinite(results[1][0])
        assert [results[i][0] for i in (0, 2, 3)] == pytest.approx(norms, rel=1e-6)
        for name, (start, value) in parameters.items():
            expected = reference.masters[name][start : start + len(value)].to(dtype).float()
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    first, second = (rank[case][0] for rank in two_ranks)
    assert [norm for norm, taken in first if taken] == [norm for norm, taken in second if taken]


def test_masters_follow_a_float32_reference(stepper):
    optimizer, chunk, step, dtype = stepper
    reference = Reference(list(values(chunk)), dtype)
    # Steps too small for bf16 to show each of them.
    for number in range(3):
        expected = reference.step(number, 1e-3)
        assert step(number, 1e-3) == (pytest.approx(expected, rel=1e-6), True)
    for name, value in values(chunk).items():
        torch.testing.assert_close(value, reference.masters[name].to(dtype).float())
    masters = [t.flatten() for t in optimizer.state_tensors() if t.dtype == torch.float32]
    for value in reference.masters.values():
        same_size = [master for master in masters if master.numel() == value.numel()]
        assert any(torch.allclose(master, value.flatten(), atol=1e-6) for master in same_size)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(stepper):
    optimizer, chunk, step, _ = stepper
    step(0)
    before = [tensor.detach().clone() for tensor in optimizer.state_tensors()]
    weights = values(chunk)
    optimizer.zero_grad()
    chunk.module.tied.main_grad[0, 0] = math.nan
    norm, taken = optimizer.step(0.05)
    assert (math.isnan(norm), taken, optimizer.num_steps) == (True, False, 1)
    after = list(optimizer.state_tensors())
    assert len(before) == len(after) > 0
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in values(chunk).items())
    assert step(1)[1]


def test_a_reset_clears_moments_and_steps(stepper):
    optimizer, chunk, step, dtype = stepper
    for number in range(3):
        step(number)
    optimizer.reset()
    assert optimizer.num_steps == 0
    before = values(chunk)["vector"]
    step(0, 0.25)
    moved = values(chunk)["vector"] - before
    # As in a first step; with old moments or a later step's correction it would be smaller.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        moved, -0.25 * whole("vector", 0).sign(), rtol=tolerance, atol=tolerance
    )


def test_masters_are_taken_from_loaded_parameters(stepper):
    optimizer, chunk, step, _ = stepper
    step(0)
    with torch.no_grad():
        for parameter in chunk.module.parameters():
            parameter.fill_(0.5)
    optimizer.reload_master_weights()
    optimizer.reset()
    step(0, 0.0)
    assert all((value == 0.5).all() for value in values(chunk).values())


def test_chunks_wrapped_otherwise_are_refused(one_rank):
    chunk = wrap(one_rank, distributed=False)
    with pytest.raises(InputError) as caught:
        AdamOptimizer([chunk], one_rank, SETTINGS, torch.float32, distributed=True)
    assert (caught.value.name, caught.value.got) == ("distributed", True)


def test_a_field_that_is_set_here_is_none_of_the_users(one_rank, monkeypatch):
    given = {}

    def record(**values):
        given.update(values)
        return OptimizerConfig(**values)

    monkeypatch.setattr(optimizer_module, "OptimizerConfig", record)
    chunk = wrap(one_rank, distributed=False)
    AdamOptimizer([chunk], one_rank, SETTINGS, torch.float32, distributed=False)
    known = {field.name for field in fields(OptimizerConfig)}
    assert given and given.keys() <= OPTIMIZER.owners.keys() <= known


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_a_users_fields_reach_adam_and_its_state_is_restored(one_rank, is_decoupled):
    options = {"adam_eps": 0.5, "decoupled_weight_decay": is_decoupled}
    chunk = wrap(one_rank, distributed=False)
    settings = replace(SETTINGS, megatron=options)
    optimizer = AdamOptimizer([chunk], one_rank, settings, torch.float32, distributed=False)
    list(optimizer.state_shards())  # creates the state
    optimizer.set_num_steps(3)
    (adam,) = (one.optimizer for one in optimizer._chained_optimizers)
    assert (
        type(adam)
        is optimizer.adam_class
        is (torch.optim.AdamW if is_decoupled else torch.optim.Adam)
    )
    assert {group["eps"] for group in adam.param_groups} == {0.5}
    assert {float(state["step"]) for state in adam.state.values()} == {3.0}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_run_resumes_with_and_without_the_distributed_optimizer(
    one_rank, dtype, before, after, num_steps
):
    chunk, optimizer, step = build(one_rank, dtype, before, experts=True)
    for number in range(num_steps):
        step(number)
    shards, steps = saved(chunk, optimizer)
    assert steps == num_steps
    other, resumed, step_other = build(one_rank, dtype, after, experts=True)
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


def test_every_parameter_has_its_value_and_moments(one_rank):
    chunk, optimizer, step = build(one_rank, torch.float32, distributed=True, experts=True)
    step(0)
    state = {name: (first, values) for name, first, values in saved(chunk, optimizer)[0]}
    assert set(state) == {name for name, _ in chunk.module.named_parameters()}
    for name, parameter in chunk.module.named_parameters():
        first, values = state[name]
        assert (first, set(values)) == (0, set(KINDS))
        assert torch.equal(values["param"], parameter.detach().flatten())
        # After one step the first moment is a part of the clipped gradient, the second of its
        # square.
        gradient = values["exp_avg"] / (1 - SETTINGS.betas[0])
        torch.testing.assert_close(gradient.square(), values["exp_avg_sq"] / 0.1)


def test_shards_of_two_ranks_are_merged_and_split_again(rank_pool):
    for results in rank_pool.run(resume, 2):
        expected = results.pop("uninterrupted")
        assert set(results) == {"distributed", "plain"}
        for parameters in results.values():
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)

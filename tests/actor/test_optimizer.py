from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.actor.model import wrap_data_parallel
from mega_agentrl.actor.optimizer import PolicyOptimizer
from mega_agentrl.config.schema import OptimConfig


@pytest.fixture
def stepper(one_model):
    """(optimizer, parameters, fill): `fill(value)` sets every gradient."""
    _, groups, model = one_model
    wrapped = wrap_data_parallel(model, groups)
    settings = OptimConfig(lr=0.1, weight_decay=0.5, grad_clip=1.0)
    optimizer = PolicyOptimizer(wrapped, groups, settings)

    def fill(value):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.main_grad.fill_(value)

    return optimizer, dict(model.named_parameters()), fill


def test_decay_spares_vectors_and_the_norm_is_reported_before_clipping(stepper):
    optimizer, parameters, fill = stepper
    before = {name: value.detach().clone() for name, value in parameters.items()}
    fill(2.0)
    norm, taken = optimizer.step(0.01)
    count = sum(value.numel() for value in parameters.values())
    assert norm == pytest.approx(2.0 * math.sqrt(count), rel=1e-5)
    assert taken
    for name, value in parameters.items():
        # Adam's first step has the size of the learning rate, whatever the gradient's scale.
        decay = 1 - 0.01 * 0.5 if value.ndim > 1 else 1.0
        expected = before[name] * decay - 0.01
        torch.testing.assert_close(value.detach(), expected, rtol=1e-3, atol=2e-5)


def test_a_norm_that_is_not_finite_changes_nothing(stepper):
    optimizer, parameters, fill = stepper
    before = {name: value.detach().clone() for name, value in parameters.items()}
    fill(math.nan)
    _, taken = optimizer.step(0.01)
    assert not taken
    assert all(torch.equal(value, before[name]) for name, value in parameters.items())
    fill(1.0)
    assert optimizer.step(0.01)[1]


def test_a_reset_forgets_the_moments(stepper):
    optimizer, parameters, fill = stepper
    vector = parameters["decoder.final_layernorm.weight"]
    fill(1.0)
    optimizer.step(0.01)
    optimizer.reset()
    before = vector.detach().clone()
    fill(-1.0)
    optimizer.step(0.01)
    # With the first step's moments the second would cancel against it.
    torch.testing.assert_close(vector.detach() - before, torch.full_like(before, 0.01))

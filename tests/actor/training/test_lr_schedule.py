from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.actor.training.lr_schedule import compute_learning_rate
from mega_agentrl.config.enums import LrSchedule
from mega_agentrl.config.schema import OptimConfig


def course(total_steps, *, length=None, **settings):
    config = OptimConfig(**settings)
    return [
        compute_learning_rate(step, config, total_steps) for step in range(length or total_steps)
    ]


def test_a_constant_rate_after_a_straight_rise():
    rates = course(6, lr=0.8, lr_warmup_steps=4)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_line_down_to_the_least_rate_and_no_further():
    rates = course(
        5, length=7, lr=1.0, min_lr=0.2, lr_schedule=LrSchedule.linear, lr_warmup_steps=1
    )
    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_cosine_over_the_whole_run():
    rates = course(4, length=6, lr=2.0, lr_schedule=LrSchedule.cosine)
    half = 2.0**0.5 / 2
    assert rates == pytest.approx([2.0, 1 + half, 1.0, 1 - half, 0.0, 0.0])


def test_a_run_shorter_than_its_warm_up_only_rises():
    assert course(2, lr=1.0, lr_schedule=LrSchedule.cosine, lr_warmup_steps=10) == pytest.approx(
        [0.1, 0.2]
    )


@pytest.mark.parametrize(("step", "total_steps"), [(-1, 5), (0, 0)])
def test_what_is_no_step_of_a_run_is_refused(step, total_steps):
    with pytest.raises(ValueError, match="learning_rate: got step"):
        compute_learning_rate(step, OptimConfig(), total_steps)


@given(
    schedule=st.sampled_from(LrSchedule),
    lr=st.floats(1e-8, 1.0),
    least=st.floats(0.0, 1.0),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 40),
)
def test_it_rises_then_falls_within_its_bounds_in_small_steps(schedule, lr, least, warmup, decay):
    end = warmup + decay
    rates = course(
        end,
        length=end + 5,
        lr=lr,
        min_lr=lr * least,
        lr_schedule=schedule,
        lr_warmup_steps=warmup,
    )
    rise, fall = rates[:warmup], rates[warmup:]
    assert rise == sorted(rise)
    assert all(late <= early * (1 + 1e-12) for early, late in itertools.pairwise(fall))
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rise)
    assert all(lr * least * (1 - 1e-9) <= rate <= lr * (1 + 1e-12) for rate in fall)
    # No jump: at most the steepest slope of a cosine, pi / 2 times a line's, and at the joint
    # of warm-up and decay none at all.
    steepest = lr / min(warmup or decay, decay) * 1.5708
    assert all(abs(b - a) <= steepest * 1.0001 for a, b in itertools.pairwise(rates))
    if warmup:
        assert rates[warmup - 1] == pytest.approx(rates[warmup])

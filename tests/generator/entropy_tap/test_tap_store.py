"""The tap's maths by hand, and its bookkeeping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.generator.entropy_tap.tap_store import TapStore, measure_logits


def test_two_equal_tokens_have_entropy_log_2_at_any_temperature():
    logits_RV = torch.tensor([[1.0, 1.0, -math.inf], [0.0, 0.0, -math.inf]])
    entropy_R, shift_R, argmax_R = measure_logits(logits_RV, torch.tensor([1.0, 0.5]))
    assert entropy_R.tolist() == pytest.approx([math.log(2)] * 2)
    # LSE(0, 0) / 0.5 - LSE(0, 0) = 2 log 2 - log 2
    assert shift_R.tolist() == pytest.approx([0.0, math.log(2)])
    assert argmax_R.tolist()[0] in (0, 1)


@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 3.0), offset=st.floats(-30, 30))
def test_shift_turns_raw_log_probs_into_those_at_the_temperature(seed, temperature, offset):
    logits_RV = torch.randn(3, 50, generator=torch.manual_seed(seed)) * 5 + offset
    temperature_R = torch.full((3,), temperature)
    entropy_R, shift_R, _ = measure_logits(logits_RV, temperature_R)
    expected_RV = (logits_RV.double() / temperature).log_softmax(-1)
    got_RV = logits_RV.double().log_softmax(-1) / temperature + shift_R[:, None]
    assert torch.allclose(got_RV, expected_RV, atol=2e-4)
    assert torch.allclose(entropy_R, -(expected_RV.exp() * expected_RV).sum(-1), atol=1e-4)


def step(*entropies):
    count = len(entropies)
    return torch.tensor([entropies, [0.5] * count, range(count)], dtype=torch.float64)


def test_values_are_read_by_position_and_deleted_when_taken():
    store = TapStore()
    store.open("a")
    store.open("b")
    store.record(step(1.0, 2.0), [("a", 0, 0), ("b", 0, 1)])
    store.record(step(3.0), [("b", 1, 0)])
    assert store.read("b").entropies == (2.0, 3.0)
    assert store.read("b").argmax_ids == (1, 0)
    assert store.take("b").logp_shifts == (0.5, 0.5)
    assert store.take("b").entropies == ()
    assert len(store) == 1


def test_a_repeated_position_is_overwritten_and_a_gap_ends_the_record():
    store = TapStore()
    store.open("a")
    store.record(step(9.0), [("a", 0, 0)])  # partial prefill
    store.record(step(1.0), [("a", 0, 0)])
    store.record(step(2.0), [("a", 2, 0)])
    assert store.read("a").entropies == (1.0,)


def test_measurements_of_unknown_requests_are_dropped():
    store = TapStore()
    store.record(step(1.0), [("late", 5, 0)])
    assert len(store) == 0

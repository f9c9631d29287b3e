"""The tap's maths by hand, and the way of its values through vLLM's log-probs.

`test_live_engine` has the V1 sampler in a worker, `test_entropy_tap_on_gpu` that of V2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import LogprobsTensors

from mega_agentrl.generator.entropy_tap import (
    Measurements,
    TapRecord,
    attach_measurements,
    measure_logits,
    read_measurements,
    tap_sampler,
)


def test_two_equal_tokens_have_entropy_log_2_at_any_temperature():
    logits_RV = torch.tensor([[1.0, 1.0, -math.inf], [0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]])
    got = measure_logits(logits_RV, torch.tensor([1.0, 0.5, 0.0]))
    assert got.entropy_R.tolist() == pytest.approx([math.log(2)] * 3)
    # LSE(0, 0) / 0.5 - LSE(0, 0) = 2 log 2 - log 2; a greedy row is measured at temperature 1.
    assert got.shift_R.tolist() == pytest.approx([0.0, math.log(2), 0.0])
    assert got.argmax_R.tolist()[0] in (0, 1)


@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 3.0), offset=st.floats(-30, 30))
def test_shift_turns_raw_log_probs_into_those_at_the_temperature(seed, temperature, offset):
    logits_RV = torch.randn(3, 50, generator=torch.manual_seed(seed)) * 5 + offset
    got = measure_logits(logits_RV, torch.full((3,), temperature))
    expected_RV = (logits_RV.double() / temperature).log_softmax(-1)
    got_RV = logits_RV.double().log_softmax(-1) / temperature + got.shift_R[:, None]
    assert torch.allclose(got_RV, expected_RV, atol=2e-4)
    entropy_R = -(expected_RV.exp() * expected_RV).sum(-1)
    assert torch.allclose(got.entropy_R.double(), entropy_R, atol=1e-4)


def log_probs(sampled, *columns):
    """vLLM's log-probs of rows with these sampled tokens, whose ids share its memory."""
    ids_RK = torch.tensor(sampled)[:, None]
    for column in columns:
        ids_RK = torch.cat([ids_RK, torch.tensor(column)[:, None]], dim=1)
    return LogprobsTensors(ids_RK, torch.zeros(ids_RK.shape), torch.ones(len(sampled)).long())


def as_returned(tensors, num_logprobs=0):
    """The log-probs of a request whose tokens were these rows, as vLLM returns them."""
    flat = FlatLogprobs()
    for ids, logps, rank in zip(*(array.tolist() for array in tensors.tolists()[:3]), strict=True):
        flat.append_fast(ids, logps, iter((rank, *range(1, num_logprobs + 1))), [None] * len(ids))
    return flat


def test_values_come_back_exactly():
    # The second row has the smallest entropy of float32, the third one below 0 by rounding.
    tiny = torch.finfo(torch.float32).smallest_normal / 2**23
    measured = Measurements(
        torch.tensor([1.25, tiny, -1e-7, 0.0]),
        torch.tensor([-3.5, 0.0, 1e30, -0.0]),
        torch.tensor([151_935, 0, 7, 2**31 - 1]),
    )
    sent = attach_measurements(log_probs([1, 2, 3, 4]), measured)
    assert read_measurements(as_returned(sent)) == TapRecord(
        entropies=(1.25, tiny, 0.0, 0.0),
        logp_shifts=(-3.5, 0.0, float(np.float32(1e30)), 0.0),
        argmax_ids=(151_935, 0, 7, 2**31 - 1),
    )


def test_alternatives_and_sampled_ids_stay_as_they_are():
    tensors = log_probs([1, 2], [5, 6], [7, 8])
    measured = Measurements(torch.ones(2), torch.zeros(2), torch.tensor([5, 6]))
    sent = attach_measurements(tensors, measured)
    assert sent.logprob_token_ids.tolist() == [[5, 5, 7], [6, 6, 8]]
    assert tensors.logprob_token_ids[:, 0].tolist() == [1, 2]
    assert read_measurements(as_returned(sent, num_logprobs=2)).argmax_ids == (5, 6)


def test_a_rank_is_not_taken_for_a_measurement():
    measured = Measurements(torch.ones(1), torch.zeros(1), torch.tensor([5]))
    flat = as_returned(attach_measurements(log_probs([1]), measured))
    flat.append_fast([1], [0.0], iter([300]), [None])
    with pytest.raises(RuntimeError, match="token 1 of 2 has rank 300"):
        read_measurements(flat)


@dataclass
class V2Sampler:
    """Samples token 0 as vLLM's sampler on GPUs does, which it is not possible to run on a CPU."""

    temperatures: list[float]
    has_logprobs: bool = True

    def __post_init__(self):
        by_slot = torch.tensor(self.temperatures)
        temperature = SimpleNamespace(np=by_slot.numpy(), gpu=by_slot)
        self.sampling_states = SimpleNamespace(temperature=temperature)

    def get_logprobs_dims(self, slots):
        return (0, 0) if self.has_logprobs else None

    def __call__(self, logits, input_batch):
        logits /= 9.0  # samplers work in place
        sampled = torch.zeros(len(logits), dtype=torch.int64)
        tensors = LogprobsTensors(sampled[:, None], torch.zeros(len(logits), 1), sampled + 1)
        return SimpleNamespace(
            sampled_token_ids=sampled[:, None],
            logprobs_tensors=tensors if self.has_logprobs else None,
        )


def batch(slots):
    return SimpleNamespace(idx_mapping_np=np.array(slots), expanded_idx_mapping=torch.tensor(slots))


@pytest.mark.parametrize(
    ("slots", "shifts"),
    [([2, 0], [0.0, 0.0]), ([1, 2], [math.log(2) / 0.5 - math.log(2), 0.0])],
    ids=["unit-and-greedy", "warm"],
)
def test_rows_of_v2_are_measured_at_the_temperature_of_their_slot(slots, shifts):
    sampler = tap_sampler(V2Sampler([1.0, 0.5, 0.0]))
    logits = torch.tensor([[3.0, 3.0], [0.0, math.log(3.0)]])
    output = sampler(logits, batch(slots))
    got = read_measurements(as_returned(output.logprobs_tensors))
    expected = [math.log(2), -0.25 * math.log(0.25) - 0.75 * math.log(0.75)]
    assert got.entropies == pytest.approx(expected)
    assert got.logp_shifts == pytest.approx(shifts)
    assert got.argmax_ids[1] == 1
    assert output.sampled_token_ids.tolist() == [[0], [0]]


def test_requests_without_log_probs_are_sampled_as_without_the_tap():
    sampler = tap_sampler(V2Sampler([1.0], has_logprobs=False))
    assert sampler(torch.zeros(1, 2), batch([0])).logprobs_tensors is None
    assert sampler.temperatures == [1.0]

"""The V2 adapter on hand-made batches; inside vLLM it is `tests/gpu/test_entropy_tap_on_gpu.py`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams

from mega_agentrl.generator.entropy_tap import runner_v2
from mega_agentrl.generator.entropy_tap.tap_store import TAP_KEY_ARG, TapStore


@pytest.fixture
def tap(monkeypatch):
    store = TapStore()
    monkeypatch.setattr(runner_v2, "TAP_STORE", store)
    monkeypatch.setattr(runner_v2, "get_tensor_model_parallel_rank", lambda: 0)
    prompt_len = SimpleNamespace(np=np.array([4, 10, 3]))
    return runner_v2.EntropyTapV2(None, SimpleNamespace(max_num_reqs=3, prompt_len=prompt_len))


def params(key, temperature):
    return SamplingParams(temperature=temperature, extra_args={TAP_KEY_ARG: key} if key else None)


def batch(slots, num_visible):
    return SimpleNamespace(
        idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(num_visible)
    )


def test_rows_find_their_slot_and_position(tap):
    assert tap.add_request(2, params("c", 2.0))
    assert tap.add_request(1, params("b", 0.0))
    assert not tap.add_request(0, params(None, 1.0))
    logits = torch.tensor([[0.0, 0.0], [0.0, 5.0], [0.0, math.log(3.0)]])
    assert tap.apply(logits, batch([2, 0, 1], [3, 4, 10])) is logits
    # Slot 1 is re-prefilled up to 7 of its 10 prompt tokens: not a sample.
    tap.apply(torch.zeros(2, 2), batch([1, 2], [7, 4]))
    record = runner_v2.TAP_STORE.read("c")
    assert record.entropies == pytest.approx((math.log(2),) * 2)
    assert record.logp_shifts == pytest.approx((math.log(2) / 2 - math.log(2),) * 2)
    assert runner_v2.TAP_STORE.read("b").argmax_ids == (1,)


def test_a_slot_is_taken_over_by_the_next_request(tap):
    tap.add_request(0, params("old", 1.0))
    tap.add_request(0, params("new", 1.0))
    tap.apply(torch.zeros(1, 2), batch([0], [4]))
    assert runner_v2.TAP_STORE.read("old").entropies == ()
    assert len(runner_v2.TAP_STORE.read("new").entropies) == 1

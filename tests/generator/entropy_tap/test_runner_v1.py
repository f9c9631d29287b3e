"""The V1 adapter on a rank that does not record; `test_live_engine` has one that does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from mega_agentrl.generator.entropy_tap import runner_v1
from mega_agentrl.generator.entropy_tap.tap_store import TAP_KEY_ARG, TapStore


def test_other_tensor_parallel_ranks_record_nothing(monkeypatch):
    store = TapStore()
    monkeypatch.setattr(runner_v1, "TAP_STORE", store)
    monkeypatch.setattr(runner_v1, "get_tensor_model_parallel_rank", lambda: 1)
    tap = runner_v1.EntropyTapV1(None, torch.device("cpu"), False)
    request = (0, SamplingParams(extra_args={TAP_KEY_ARG: "a"}), None, [])
    tap.update_state(BatchUpdate(batch_size=1, added=[request], removed=(), moved=()))
    tap.apply(torch.zeros(1, 2))
    assert len(store) == 0

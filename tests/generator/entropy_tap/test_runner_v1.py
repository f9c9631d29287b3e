"""The V1 adapter follows vLLM's batch updates; the processor itself runs in `test_live_engine`."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from mega_agentrl.generator.entropy_tap import runner_v1
from mega_agentrl.generator.entropy_tap.tap_store import TAP_KEY_ARG, TapStore


@pytest.fixture
def store(monkeypatch):
    store = TapStore()
    monkeypatch.setattr(runner_v1, "TAP_STORE", store)
    monkeypatch.setattr(runner_v1, "get_tensor_model_parallel_rank", lambda: 0)
    return store


def params(key, temperature=1.0):
    return SamplingParams(temperature=temperature, extra_args={TAP_KEY_ARG: key} if key else None)


def update(size, *, added=(), removed=(), moved=()):
    return BatchUpdate(batch_size=size, added=added, removed=removed, moved=moved)


def test_rows_are_added_moved_and_removed(store):
    tap = runner_v1.EntropyTapV1(None, torch.device("cpu"), False)
    ids = {"a": [], "c": []}
    added = [
        (0, params("a", 2.0), None, ids["a"]),
        (1, params(None), None, []),
        (2, params("c", 0.0), None, ids["c"]),
    ]
    tap.update_state(update(3, added=added))
    logits = torch.tensor([[0.0, 0.0], [0.0, 9.0], [0.0, math.log(3.0)]])
    assert tap.apply(logits) is logits
    assert store.read("a").entropies == pytest.approx((math.log(2),))
    assert store.read("c").logp_shifts == (0.0,)
    ids["a"].append(7)
    ids["c"].append(7)
    move = (2, 0, MoveDirectionality.UNIDIRECTIONAL)
    tap.update_state(update(2, removed=[0], moved=[move]))
    tap.apply(torch.tensor([[0.0, 50.0], [0.0, 0.0]]))
    assert store.read("a").entropies == pytest.approx((math.log(2),))
    assert store.read("c").entropies[1] == pytest.approx(0.0, abs=1e-12)


def test_other_tensor_parallel_ranks_record_nothing(store, monkeypatch):
    monkeypatch.setattr(runner_v1, "get_tensor_model_parallel_rank", lambda: 1)
    tap = runner_v1.EntropyTapV1(None, torch.device("cpu"), False)
    tap.update_state(update(1, added=[(0, params("a"), None, [])]))
    tap.apply(torch.zeros(1, 2))
    assert len(store) == 0


def test_it_runs_for_greedy_requests_too(store):
    assert not runner_v1.EntropyTapV1(None, torch.device("cpu"), False).is_argmax_invariant()

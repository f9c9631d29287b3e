"""A worker receives weights and refuses to compute with wrong ones; `test_live_engine` has vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from mega_agentrl.config.sections.policy import LoraConfig
from mega_agentrl.generator.weights import transfer_engine as transfer
from mega_agentrl.generator.weights.transfer_engine import (
    ReshardInitInfo,
    ReshardTransferEngine,
    ReshardUpdateInfo,
    find_tied_modules,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
from mega_agentrl.reshard.session import TransferContent
from mega_agentrl.reshard.verify.digest import compute_digests
from tests.reshard.fake_rollout import frame_of

RECT = Rect((0, 0), (2, 3))
LAYOUT = [ShardLayout("weight", (2, 3), (Block("w", RECT, RECT),))]
VALUES = torch.arange(6.0).reshape(2, 3)


class FakeExecutor:
    """Writes VALUES, or fails as an executor does."""

    rank = 7

    def __init__(self, error=None):
        self.error, self.is_open = error, True

    def receive(self, writer, version):
        if self.error is not None:
            raise self.error
        writer.write(*frame_of({ParamSlice("weight", RECT): VALUES * version}))

    def sources_of(self, name):
        return {3: [5]}

    def close(self):
        self.is_open = False


@pytest.fixture
def worker(monkeypatch):
    """A transfer engine whose `executor` the test may replace before it joins."""
    plan = SimpleNamespace(num_trainer_ranks=4, dtype_of={"w": "float32"})
    session = SimpleNamespace(plan=plan, content=TransferContent.weights, lora=None)
    model = nn.Linear(3, 2, bias=False).requires_grad_(False)
    nn.init.zeros_(model.weight)
    record_metadata_for_reloading(model)
    model_config = SimpleNamespace(dtype=torch.float32)
    config = SimpleNamespace(parallel_config=None, model_config=model_config)
    receiver = ReshardTransferEngine(None, config, torch.device("cpu"), model)
    receiver.executor, receiver.session = FakeExecutor(), session
    monkeypatch.setattr(transfer, "trace_worker_layout", lambda config: LAYOUT)
    monkeypatch.setattr(transfer.TransferSession, "from_bytes", lambda data: session)
    monkeypatch.setattr(transfer, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(transfer, "join_session", lambda session, rank, layout: receiver.executor)
    return receiver


def expected(values):
    return compute_digests([(values, RECT)])


def received(worker, version, executor=None):
    worker.executor = executor or FakeExecutor()
    worker.init_transfer_engine(ReshardInitInfo(b"", first_rank=7))
    worker.start_weight_update()
    worker.receive_weights(ReshardUpdateInfo(version))


def check_computes(worker, values):
    worker.check_weights_verified()
    assert torch.equal(worker.model(torch.eye(3)), values.T)


def check_refuses(worker, message):
    """The error leaves the worker as text."""
    with pytest.raises(RuntimeError, match=f"forward pass refused: {message}"):
        worker.model(torch.zeros(3))
    with pytest.raises(RuntimeError, match=f"forward pass refused: {message}"):
        worker.guard_execute_model(lambda scheduled: "tokens")(
            SimpleNamespace(total_num_scheduled_tokens=1)
        )


def test_a_good_update_goes_through_all_states(worker):
    check_computes(worker, torch.zeros(2, 3))
    for version in (1, 2):
        received(worker, version)
        check_refuses(worker, "a weight update is in state 'received'")
        worker.verify(version, expected(VALUES * version))
        check_refuses(worker, "a weight update is in state 'verified'")
        worker.finish_weight_update()
        assert worker.failure is None
        check_computes(worker, VALUES * version)


def test_a_step_without_tokens_is_never_refused(worker):
    received(worker, 1)
    step = worker.guard_execute_model(lambda scheduled, more, key: (more, key))
    assert step(SimpleNamespace(total_num_scheduled_tokens=0), 1, key=2) == (1, 2)


def test_other_digests_are_refused_with_names_until_a_good_update(worker):
    received(worker, 1)
    worker.verify(1, expected(VALUES + 1))
    assert not worker.failure.is_caused_by_peer
    message = r"weight version 1: verification failed: w .* on rank 7 .*rank 3 in bucket 5"
    check_refuses(worker, message)
    worker.finish_weight_update()  # too late
    check_refuses(worker, message)
    received(worker, 2)
    worker.verify(2, expected(VALUES * 2))
    worker.finish_weight_update()
    check_computes(worker, VALUES * 2)


def lost_peer():
    lost = RuntimeError("rank 7 could not receive from rank 3")
    lost.__cause__ = RuntimeError("Connection closed by peer")
    return lost


@pytest.mark.parametrize(
    ("error", "is_caused_by_peer"),
    [
        (lost_peer(), True),
        (RuntimeError("out of memory"), False),
        (ValueError("a bucket was lost"), False),
        (KeyError("weight"), False),
    ],
    ids=["lost-peer", "own-error", "wrong-frame", "bug"],
)
def test_a_failure_is_recorded_and_the_session_left(worker, error, is_caused_by_peer):
    received(worker, 1, FakeExecutor(error))
    assert worker.failure.is_caused_by_peer is is_caused_by_peer
    assert "weight version 1: " in worker.failure.reason
    assert str(error) in worker.failure.reason
    assert not worker.executor.is_open
    check_refuses(worker, "weight version 1: ")
    worker.verify(1, expected(VALUES))
    worker.finish_weight_update()
    check_refuses(worker, "weight version 1: ")
    assert torch.equal(worker.model.weight, torch.zeros(2, 3))  # a whole module again


@pytest.mark.parametrize("state", ["ready", "received", "verified"])
def test_a_rejected_worker_refuses_in_any_state(worker, state):
    if state != "ready":
        received(worker, 1)
    if state == "verified":
        worker.verify(1, expected(VALUES))
    worker.reject("the probe differs")
    check_refuses(worker, "the probe differs")
    worker.reject("something later")
    check_refuses(worker, "the probe differs")
    received(worker, 2)
    worker.verify(2, expected(VALUES * 2))
    worker.finish_weight_update()
    check_computes(worker, VALUES * 2)


LORA_LAYOUT = [ShardLayout("weight", (2, 3), (Block("layer.q_proj.weight", RECT, RECT),))]
FACTORS = {
    "lora.q_proj.A": torch.tensor([[1.0, 2.0, 4.0]]),
    "lora.q_proj.B": torch.tensor([[1.0], [-1.0]]),
}
CHANGE = torch.tensor([[2.0, 4.0, 8.0], [-2.0, -4.0, -8.0]])  # scale 2


class FakeAdapterExecutor(FakeExecutor):
    """Writes FACTORS, with B times the version."""

    def receive(self, writer, version):
        for name, value in FACTORS.items():
            scaled = value * version if name.endswith("B") else value
            rect = Rect.whole(tuple(value.shape))
            writer.write(*frame_of({ParamSlice(name, rect): scaled}))


@pytest.fixture
def worker_with_adapters(worker, monkeypatch):
    """A worker that has joined both sessions of a link."""
    monkeypatch.setattr(transfer, "trace_worker_layout", lambda config: LORA_LAYOUT)
    worker.session.lora = LoraConfig(rank=1, alpha=2.0)
    worker.session.plan.dtype_of = {"layer.q_proj.weight": "float32"}
    worker.init_transfer_engine(ReshardInitInfo(b"", first_rank=7))
    worker.session.content = TransferContent.adapters
    worker.executor = FakeAdapterExecutor()
    worker.init_transfer_engine(ReshardInitInfo(b"", first_rank=7))
    assert worker.failure is None
    return worker


def update(worker, version, contents, values):
    worker.start_weight_update()
    worker.receive_weights(ReshardUpdateInfo(version, contents))
    worker.verify(version, expected(values))
    worker.finish_weight_update()


def test_adapters_are_merged_into_the_weights_below_in_each_update(worker_with_adapters):
    worker = worker_with_adapters
    update(worker, 1, ["weights", "adapters"], VALUES + CHANGE)
    check_computes(worker, VALUES + CHANGE)
    for version in (2, 5):
        update(worker, version, ["adapters"], VALUES + version * CHANGE)
        assert worker.failure is None
        check_computes(worker, VALUES + version * CHANGE)


def test_adapters_that_were_never_merged_are_refused(worker_with_adapters):
    worker = worker_with_adapters
    update(worker, 1, ["weights"], VALUES + CHANGE)
    check_refuses(worker, r"weight version 1: verification failed: layer.q_proj.weight .*adapters")
    assert not worker.executor.is_open


def test_stale_adapters_are_refused(worker_with_adapters):
    worker = worker_with_adapters
    update(worker, 1, ["weights", "adapters"], VALUES + CHANGE)
    update(worker, 1, ["adapters"], VALUES + 2 * CHANGE)
    check_refuses(worker, "weight version 1: verification failed: layer.q_proj.weight ")


def test_an_update_without_a_session_is_a_failure_and_changes_nothing(worker):
    worker.start_weight_update()
    assert "expected a session" in worker.failure.reason
    worker.receive_weights(ReshardUpdateInfo(1))
    check_computes(worker, torch.zeros(2, 3))


def test_a_session_that_cannot_be_joined_leaves_the_weights_in_use(worker, monkeypatch):
    def fail(*args):
        raise lost_peer()

    monkeypatch.setattr(transfer, "join_session", fail)
    worker.init_transfer_engine(ReshardInitInfo(b"", first_rank=7))
    assert "joining the weight transfer: rank 7" in worker.failure.reason
    check_computes(worker, torch.zeros(2, 3))


def test_finishing_too_early_is_refused(worker):
    received(worker, 1)
    worker.finish_weight_update()
    check_refuses(worker, "finished in state 'received', expected 'verified'")


def test_no_error_leaves_a_method_even_if_the_end_of_an_update_fails(worker, monkeypatch):
    def fail(*args):
        raise AttributeError("no such kernel")

    received(worker, 1)
    monkeypatch.setattr(transfer, "finalize_layerwise_reload", fail)
    worker.verify(1, expected(VALUES))
    worker.finish_weight_update()
    check_refuses(worker, "end of a weight update: AttributeError: no such kernel")


def test_a_tied_output_layer_is_found():
    model = nn.ModuleDict({"embed": nn.Linear(2, 3), "norm": nn.LayerNorm(2), "head": nn.Module()})
    model["head"].weight = model["embed"].weight
    assert list(find_tied_modules(model)) == ["head"]

"""Weights go from trainer processes into a running engine, and broken ones do not serve.

Two tensor ranks, faults of every kind, wrong names and comparison bit for bit are in `tests/e2e`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from mega_agentrl.generator import transfer
from mega_agentrl.generator.trace import trace_destinations
from mega_agentrl.generator.transfer import (
    LinkInfo,
    ReshardTransferEngine,
    VersionInfo,
    tied_modules,
)
from mega_agentrl.reshard.delivery import Place
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.proof import Regions
from mega_agentrl.types.records import GenerateRequest
from tests.generator.live_transfer import LiveTransfer
from tests.generator.tiny_model import check_against_transformers, logits_of, write_model
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import Fault

RECT = Rect((0, 0), (2, 3))
LAYOUT = [ShardLayout("weight", (2, 3), (Block("w", RECT, RECT),))]
VALUES = torch.arange(6.0).reshape(2, 3)


# --- One worker without vLLM around it ---


class Courier:
    """Brings VALUES, or fails as a courier does."""

    rank = 7

    def __init__(self, error=None):
        self.error, self.is_open = error, True

    def receive(self, landing, version):
        if self.error is not None:
            raise self.error
        landing.write(Place("weight", RECT), VALUES * version)

    def sources_of(self, name):
        return {3: [5]}

    def close(self):
        self.is_open = False


class Model(nn.Linear):
    """Its weight starts as zeros."""

    def __init__(self):
        super().__init__(3, 2, bias=False)
        self.weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


@pytest.fixture
def worker(monkeypatch):
    """A receiver whose `courier` the test may exchange before it joins."""
    plan = SimpleNamespace(num_sources=4, dtype_of={"w": "float32"})
    link = SimpleNamespace(plan=plan, first_sink=3)
    model = Model()
    record_metadata_for_reloading(model)
    model_config = SimpleNamespace(dtype=torch.float32)
    config = SimpleNamespace(parallel_config=None, model_config=model_config)
    receiver = ReshardTransferEngine(None, config, torch.device("cpu"), model)
    receiver.courier = Courier()
    monkeypatch.setattr(transfer, "trace_worker", lambda config: LAYOUT)
    monkeypatch.setattr(transfer.WeightLink, "from_plain", lambda plain: link)
    monkeypatch.setattr(transfer, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(transfer, "join", lambda link, rank, layout: receiver.courier)
    return receiver


def expected(values):
    regions = Regions(LAYOUT, {"w": "float32"})
    regions.take([(LAYOUT[0], values)])
    return regions._found


def received(worker, version, courier=None):
    worker.courier = courier or Courier()
    worker.init_transfer_engine(LinkInfo(b""))
    worker.start_weight_update()
    worker.receive_weights(VersionInfo(version))


def check_computes(worker, values):
    worker.check_proven()
    assert torch.equal(worker.model(torch.eye(3)), values.T)


def check_refuses(worker, message):
    with pytest.raises(RuntimeError, match=f"forward pass refused: {message}"):
        worker.model(torch.zeros(3))
    with pytest.raises(RuntimeError, match=f"forward pass refused: {message}"):
        worker.guarded(lambda scheduled: "tokens")(SimpleNamespace(total_num_scheduled_tokens=1))


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
    step = worker.guarded(lambda scheduled, more, key: (more, key))
    assert step(SimpleNamespace(total_num_scheduled_tokens=0), 1, key=2) == (1, 2)


def test_other_digests_are_refused_with_names_until_a_good_update(worker):
    received(worker, 1)
    worker.verify(1, expected(VALUES + 1))
    assert not worker.failure.is_consequence
    message = r"weight version 1: proof failed: w .* on rank 7 .*rank 3 in bucket 5"
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
    ("error", "is_consequence"),
    [
        (lost_peer(), True),
        (RuntimeError("out of memory"), False),
        (ValueError("a bucket was lost"), False),
        (KeyError("weight"), False),
    ],
)
def test_what_goes_wrong_is_kept_and_the_link_left(worker, error, is_consequence):
    received(worker, 1, Courier(error))
    assert worker.failure.is_consequence is is_consequence
    assert "weight version 1: " in worker.failure.reason
    assert str(error) in worker.failure.reason
    assert not worker.courier.is_open
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


def test_an_update_without_a_link_is_a_failure_and_changes_nothing(worker):
    worker.start_weight_update()
    assert "expected a link" in worker.failure.reason
    worker.receive_weights(VersionInfo(1))
    check_computes(worker, torch.zeros(2, 3))


def test_a_link_that_cannot_be_joined_leaves_the_weights_in_use(worker, monkeypatch):
    def fail(*args):
        raise lost_peer()

    monkeypatch.setattr(transfer, "join", fail)
    worker.init_transfer_engine(LinkInfo(b""))
    assert "joining the weight transfer: rank 7" in worker.failure.reason
    check_computes(worker, torch.zeros(2, 3))


def test_finishing_too_early_is_refused(worker):
    received(worker, 1)
    worker.finish_weight_update()
    check_refuses(worker, "finished in state 'received', expected 'verified'")


def test_no_error_leaves_a_method_even_where_the_return_fails(worker, monkeypatch):
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
    assert list(tied_modules(model)) == ["head"]


# --- A live engine ---

PROMPT = tuple(range(5, 85))


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("new"), seed=1, scale=4.0)


@pytest.fixture(scope="module")
def trainer(model_folder):
    trainer = FakeTrainer(model_folder)
    yield trainer
    trainer.close()


@pytest.fixture
def update(engine, trainer, model_folder):
    """Connected; leaves the engine with the weights that other tests expect."""
    update = LiveTransfer(trainer, [engine])
    update.connect()
    yield update
    update.connect()
    update(model_folder, 100)


def request(name, prompt=PROMPT):
    return GenerateRequest(request_id=name, token_ids=prompt, max_tokens=20)


def check_serves(engine, folder, name):
    """The engine's numbers are those of the model in `folder`."""
    got = engine.call("generate", request(name))
    assert got.version == engine.call("version")
    check_against_transformers(folder, request(name), got)


def prompt_logps(folder):
    """Of the tokens of PROMPT after the first, by transformers."""
    logp_TV = logits_of(folder, PROMPT[:1], PROMPT[1:]).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def check_refuses_at_once(engine, message):
    refusal = engine.begin("generate", request("refused")).exception(5.0)
    assert "refuses to generate" in str(refusal)
    assert message in str(refusal)


def test_updates_take_effect_though_the_prompt_was_cached(engine, update, model_folder, new_folder):
    check_serves(engine, model_folder, "before")
    check_serves(engine, model_folder, "cached")
    for version, folder in enumerate((new_folder, model_folder, new_folder), 1):
        update(folder, version)
        assert engine.call("version") == version
        check_serves(engine, folder, f"after {version}")


def test_the_probe_gives_the_log_probs_of_the_model(engine, update, new_folder):
    update(new_folder, 1)
    for _ in range(2):
        found_T = torch.tensor(engine.call("probe", PROMPT))
        torch.testing.assert_close(found_T, prompt_logps(new_folder), rtol=0, atol=1e-3)


def test_the_worker_s_layout_is_the_traced_one(engine, update, model_folder):
    assert update.layouts == [trace_destinations(model_folder, 1, "float32")]


def test_a_request_during_an_update_waits_for_it(engine, update, new_folder):
    results = update.move(new_folder, 5)
    waiting = engine.begin("generate", request("waits"))
    with pytest.raises(TimeoutError):
        waiting.result(1.0)
    update.prove(5, results)
    with pytest.raises(TimeoutError):
        waiting.result(0.5)
    engine.call("resume")
    got = waiting.result(60)
    assert got.version == 5
    check_against_transformers(new_folder, request("waits"), got)


def test_a_failed_update_is_refused_until_a_good_one(engine, update, trainer, new_folder):
    update(new_folder, 1)
    fault = Fault(kind="flip", rank=1, frame=1, bit=77)
    waiting = []
    with pytest.raises(RuntimeError, match=r"proof failed: \S+ Rect.* rank 4 .*rank 1 in bucket"):
        results = update.move(new_folder, 2, fault=fault)
        waiting.append(engine.begin("generate", request("waited")))
        update.prove(2, results)
    assert any(name in str(waiting[0].exception(5.0)) for name in trainer.hit.names)
    check_refuses_at_once(engine, "the update to version 2 failed: worker 0: weight version 2")
    with pytest.raises(RuntimeError, match="cannot serve: the update to version 2 failed"):
        engine.call("resume")
    assert engine.call("version") == 1
    update.connect()
    check_refuses_at_once(engine, "the update to version 2 failed")
    update(new_folder, 3)
    check_serves(engine, new_folder, "recovered")


def test_refused_by_the_driver_and_served_again(engine, update, new_folder):
    update(new_folder, 1)
    engine.call("refuse", "the probe differs")
    check_refuses_at_once(engine, "the probe differs")
    engine.call("pause")
    waiting = engine.begin("generate", request("waits for the next"))
    with pytest.raises(TimeoutError):
        waiting.result(0.5)
    with pytest.raises(RuntimeError, match="cannot serve: the probe differs"):
        engine.call("resume")
    assert "the probe differs" in str(waiting.exception(5.0))
    update.connect()
    update(new_folder, 2)
    check_serves(engine, new_folder, "served again")


def test_steps_out_of_order_are_refused(engine, update, new_folder):
    none = [np.zeros((0, 2), dtype=np.uint32)]
    with pytest.raises(RuntimeError, match=r"begins with pause\(\)"):
        engine.call("receive_weights", 1)
    with pytest.raises(RuntimeError, match="no weights to confirm"):
        engine.call("confirm_weights", 1, none)
    update.move(new_folder, 2)
    with pytest.raises(RuntimeError, match=r"cannot serve: .* in the middle of a weight update"):
        engine.call("resume")
    check_refuses_at_once(engine, "in the middle of a weight update")
    update.connect()
    update(new_folder, 3)
    check_serves(engine, new_folder, "in order")


def test_an_update_that_was_left_unfinished_does_not_hinder_the_next(engine, update, new_folder):
    update.move(new_folder, 1)
    with pytest.raises(RuntimeError, match="an update is under way"):
        engine.call("receive_weights", 2)
    update.connect()
    check_refuses_at_once(engine, "an update was left unfinished")
    update(new_folder, 3)
    check_serves(engine, new_folder, "the next")


def test_ranks_that_do_not_come_are_named_and_the_engine_serves_on(
    engine, update, trainer, new_folder
):
    update(new_folder, 1)
    short = FakeTrainer(new_folder, timeout_s=6.0)
    try:
        link = short.connect([update.layouts[0][0]], away=[2])
        with pytest.raises(RuntimeError, match=r"joining .* failed: .*missing: rank 2"):
            engine.call("connect_weights", link)
    finally:
        short.close()
    check_serves(engine, new_folder, "as before")
    update.connect()
    update(new_folder, 2)

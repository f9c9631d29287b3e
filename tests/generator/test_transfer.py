"""New weights go from two trainer processes into a running engine, and broken ones do not."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from mega_agentrl.config.schema import EngineConfig
from mega_agentrl.generator.transfer import ReshardTransferEngine, tied_modules
from mega_agentrl.reshard.plan import make_plan
from mega_agentrl.reshard.transport import SendReport
from mega_agentrl.types.records import GenerateRequest
from tests.generator.engine_host import EngineHost
from tests.generator.process_tree import descendants, wait_until_gone
from tests.generator.tiny_model import check_against_transformers, write_model
from tests.reshard.fake_trainer import FakeTrainer, shards_of


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def connected(engine, weights, num_sinks=1, bucket_bytes=20_000):
    """A fake trainer of two ranks that the engine has joined."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    layouts = [shards_of(weights, rank, 2)[0] for rank in range(2)]
    plan = make_plan(layouts, shapes, "float32", num_sinks, bucket_bytes=bucket_bytes)
    assert len(plan.messages) > 4
    trainer = FakeTrainer(plan)
    engine.call("connect_weights", trainer.link)
    return trainer


def update(engine, trainer, folder, version):
    trainer.send(weights_of(folder), version)
    engine.call("receive_weights", version)
    assert all(isinstance(result, SendReport) for result in trainer.results())
    assert engine.call("version") == version


def check_serves(engine, folder, name):
    """The engine's numbers are those of the model in `folder`."""
    request = GenerateRequest(request_id=name, token_ids=tuple(range(5, 40)), max_tokens=20)
    got = engine.call("generate", request)
    assert got.version == engine.call("version")
    check_against_transformers(folder, request, got)


def plain_engine(model):
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return ReshardTransferEngine(None, config, torch.device("cpu"), model)


def test_a_worker_refuses_to_compute_with_half_written_weights():
    model = torch.nn.Linear(2, 2)
    receiver = plain_engine(model)
    model(torch.zeros(2))
    receiver._unusable = "update to version 3 failed"
    with pytest.raises(RuntimeError, match="forward pass refused: update to version 3 failed"):
        model(torch.zeros(2))


def test_an_update_before_joining_is_an_error():
    with pytest.raises(RuntimeError, match="before the transport group was joined"):
        plain_engine(torch.nn.Linear(2, 2)).start_weight_update()


def test_a_tied_output_layer_is_found():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(2, 3), "norm": torch.nn.LayerNorm(2), "head": torch.nn.Module()}
    )
    model["head"].weight = model["embed"].weight
    assert list(tied_modules(model)) == ["head"]


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("new"), seed=1, scale=4.0)


def test_updates_take_effect_and_a_corrupted_one_stops_the_engine(engine, model_folder, new_folder):
    request = GenerateRequest(request_id="refused", token_ids=(5, 6), max_tokens=4)
    broken = "model.layers.1.self_attn.q_proj.weight"
    trainer = connected(engine, weights_of(model_folder))
    try:
        check_serves(engine, model_folder, "before")
        update(engine, trainer, new_folder, version=1)
        check_serves(engine, new_folder, "after")
        update(engine, trainer, model_folder, version=2)
        check_serves(engine, model_folder, "back")

        trainer.send(weights_of(new_folder), 3, corrupt=broken)
        with pytest.raises(RuntimeError, match=r"layers\.1\..* trainer rank \d .*bucket \d"):
            engine.call("receive_weights", 3)
        assert all(result is not None for result in trainer.results())
        assert engine.call("version") == 2
        with pytest.raises(RuntimeError, match="refuses to generate: the update to version 3"):
            engine.call("generate", request)
    finally:
        trainer.close()
    trainer = connected(engine, weights_of(model_folder))
    try:
        update(engine, trainer, model_folder, version=4)
        check_serves(engine, model_folder, "recovered")
    finally:
        trainer.close()


def test_a_request_during_an_update_waits_for_it(engine, model_folder):
    trainer = connected(engine, weights_of(model_folder))
    try:
        receiving = engine.begin("receive_weights", 5)
        waiting = engine.begin(
            "generate", GenerateRequest(request_id="waits", token_ids=(5, 6), max_tokens=4)
        )
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        trainer.send(weights_of(model_folder), 5)
        receiving.result(60)
        assert waiting.result(60).version == 5
        trainer.results()
    finally:
        trainer.close()


def test_tensor_parallel_engine_generates_updates_and_ends_with_its_host(
    model_folder, new_folder, tmp_path
):
    config = EngineConfig(tensor=2, max_model_len=256, kv_cache_gib=1)
    engine = EngineHost(config, model_folder, tmp_path / "vllm.log")
    try:
        check_serves(engine, model_folder, "before")
        trainer = connected(engine, weights_of(model_folder), num_sinks=2)
        try:
            update(engine, trainer, new_folder, version=1)
        finally:
            trainer.close()
        check_serves(engine, new_folder, "after")
        children = descendants(engine.process.pid)
        assert len(children) >= 3  # engine core and two workers
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.join(10)
        assert wait_until_gone(children, timeout_s=10.0) == []
    finally:
        engine.close()


def test_loading_is_refused_where_a_module_gets_nothing(engine, model_folder):
    weights = weights_of(model_folder)
    del weights["model.layers.0.mlp.down_proj.weight"]
    trainer = connected(engine, weights)
    try:
        trainer.send(weights, 6)
        with pytest.raises(RuntimeError, match=r"down_proj got no weights"):
            engine.call("receive_weights", 6)
        trainer.results()
    finally:
        trainer.close()
    trainer = connected(engine, weights_of(model_folder))
    try:
        update(engine, trainer, model_folder, version=7)
        check_serves(engine, model_folder, "whole again")
    finally:
        trainer.close()

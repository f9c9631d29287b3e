"""Weights go from four trainer ranks (TP2 x PP2) over gloo into running vLLM engines.

What arrives is compared with vLLM's own loader on the same folder: every parameter before it is
packed for its kernel, every parameter after it, and all logits of a prompt. Then everything that
can go wrong does, and no engine says a token until a good update.

`wide`: an engine of two workers, a sparse model. `pair`: two engines of one, a dense one with
biases. Tests that end an engine come last. Faster tests have a live engine of one worker
(`tests/generator`), and two workers that are no engine (`test_transfer_faults`).
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
import signal
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("vllm")

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator.weights.loader_trace import trace_engine_layouts
from mega_agentrl.types.records import GenerateRequest
from tests.generator import worker_probe
from tests.generator.engine_host import EngineHost
from tests.generator.live_transfer import LiveTransfer
from tests.generator.tiny_model import check_against_transformers, logits_of, write_tokenizer
from tests.processes import descendants, wait_until_gone
from tests.reshard.fake_trainer import FakeTrainer
from tests.reshard.faults import Fault
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow(1)

NUM_VERSIONS = 3
VOCAB = 61
PROMPT = tuple((7 * n) % 50 + 5 for n in range(40))
MODELS = {
    "wide": ("qwen3_moe", {"mlp_only_layers": [1], "moe_intermediate_size": 32}),
    "pair": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
NAMES = list(MODELS)
SIZES = {"num_hidden_layers": 2, "head_dim": 32, "vocab_size": VOCAB, "eos_token_id": 2}


@dataclass
class Side:
    """Engines with one model, and the folders of its weights; the engines start without weights.

    index: of the folder that was sent last.
    """

    transfer: LiveTransfer
    folders: list
    version: int = 0
    index: int = 0

    def update(self, index, **fault):
        self.transfer.trainer.use(self.folders[index])
        self.version += 1
        self.index = index
        self.transfer(self.folders[index], self.version, **fault)

    def reconnect(self, **fault):
        self.transfer.trainer.use(self.folders[0])
        self.transfer.connect(**fault)

    def recover(self, index):
        """A good update on a new link, with ranks that are alive."""
        self.transfer.trainer.revive()
        self.reconnect()
        self.update(index)
        for number, engine in enumerate(self.transfer.engines):
            check_serves(engine, self.folders[index], f"{self.version}/{number}")


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory):
    @functools.cache
    def folders(name):
        family, changes = MODELS[name]
        path = tmp_path_factory.mktemp(name)
        for seed in range(NUM_VERSIONS):
            make_tiny_model(family, path / f"{seed}", seed=seed, **SIZES | changes)
            write_tokenizer(path / f"{seed}", VOCAB)
        return [path / f"{seed}" for seed in range(NUM_VERSIONS)]

    return folders


@pytest.fixture(scope="module")
def start_engine(folders_of, tmp_path_factory):
    """Starts engines at the same time; all end with the module."""
    hosts = []

    def start(name, count, tensor):
        config = EngineConfig(tensor_parallel_size=tensor, max_model_len=128, cpu_kv_cache_gib=1)
        log = tmp_path_factory.mktemp("engine")
        no_weights = shutil.ignore_patterns("*.safetensors*")
        model = shutil.copytree(folders_of(name)[0], log / "model", ignore=no_weights)
        new = [
            EngineHost(config, model, log / f"{number}.log", wait=False, load_weights=False)
            for number in range(count)
        ]
        hosts.extend(new)
        for host in new:
            host.call("ready")
            host.call("rpc", worker_probe.start_watching)
        return new

    yield start
    for host in hosts:
        host.close()


@pytest.fixture(scope="module")
def trainer(folders_of):
    trainer = FakeTrainer(folders_of("wide")[0])
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def sides(trainer, folders_of, start_engine):
    """Started when first asked for."""

    @functools.cache
    def side(name):
        count, tensor = (1, 2) if name == "wide" else (2, 1)
        engines = start_engine(name, count, tensor)
        return Side(LiveTransfer(trainer, engines), folders_of(name))

    return side


def request(name):
    return GenerateRequest(request_id=name, token_ids=PROMPT, max_tokens=8)


def check_serves(engine, folder, name):
    check_against_transformers(folder, request(name), engine.call("generate", request(name)))


def check_refuses(engine, name):
    with pytest.raises(RuntimeError, match="refuses to generate") as refusal:
        engine.call("generate", request(name))
    return str(refusal.value)


def inspect_workers(engine):
    """Of every worker: parameters as they were before processing and as they are now; and all
    logits of PROMPT.
    """
    engine.call("compute_prompt_log_probs", PROMPT)
    workers = [pickle.loads(answer) for answer in engine.call("rpc", worker_probe.take_seen)]
    logits = torch.cat(next(worker.logits for worker in workers if worker.logits))
    assert logits.shape == (len(PROMPT), VOCAB)
    return workers, logits


def bits(tensor):
    assert tensor.dtype == torch.float32
    return tensor.contiguous().view(torch.int32)


def check_as_from_disk(engine, layouts, folder):
    """What the last transfer has left, against vLLM's loader in the same engine; its logits."""
    sent, sent_logits = inspect_workers(engine)
    engine.call("pause")
    engine.call("rpc", worker_probe.load_from_disk, None, (str(folder),))
    loaded, loaded_logits = inspect_workers(engine)
    for layout, received, reference in zip(layouts, sent, loaded, strict=True):
        for shard in layout:
            expected_values = reference.loaded.get(shard.name, reference.current.get(shard.name))
            assert expected_values.shape == shard.shape, shard.name
            got = received.loaded.get(shard.name, received.current.get(shard.name))
            assert torch.equal(bits(got), bits(expected_values)), shard.name
        assert received.current.keys() == reference.current.keys()
        for name, expected in reference.current.items():
            assert torch.equal(bits(received.current[name]), bits(expected)), name
        assert {name for name in received.loaded if name in reference.loaded} == set(
            reference.loaded
        )
    assert torch.equal(bits(sent_logits), bits(loaded_logits))
    return sent_logits


@pytest.mark.slow(45)
@pytest.mark.parametrize("name", NAMES)
def test_engines_start_without_weights_and_refuse_requests_until_they_have_some(sides, name):
    side = sides(name)
    for number, engine in enumerate(side.transfer.engines):
        assert "it has no weights yet" in check_refuses(engine, f"too early/{number}")
        with pytest.raises(RuntimeError, match="it has no weights yet"):
            engine.call("compute_prompt_log_probs", PROMPT)
        with pytest.raises(RuntimeError, match="refuses to serve: it has no weights yet"):
            engine.call("resume")
    side.recover(0)


@pytest.mark.parametrize("name", NAMES)
def test_transfers_leave_what_vllm_loads_from_disk(sides, name):
    side = sides(name)
    engines = side.transfer.engines
    for engine in engines:
        engine.call("rpc", worker_probe.take_seen)  # what earlier tests have left
    side.reconnect()
    for index in [*range(1, len(side.folders)), 0]:
        side.update(index)
        logits = [
            check_as_from_disk(engine, layouts, side.folders[index])
            for engine, layouts in zip(engines, side.transfer.layouts, strict=True)
        ]
        expected = logits_of(side.folders[index], PROMPT[:1], (*PROMPT[1:], 0))
        # vLLM works out the last position first, to sample from it.
        torch.testing.assert_close(logits[0], expected.roll(1, 0), rtol=0, atol=1e-3)
    for number, engine in enumerate(engines):
        engine.call("resume")
        check_serves(engine, side.folders[0], f"after all/{number}")


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_traces_what_is_traced_without_an_engine(sides, name):
    side = sides(name)
    for engine in side.transfer.engines:
        layouts = [packed.unpack() for packed, _ in engine.call("layout")]
        assert layouts == trace_engine_layouts(side.folders[0], len(layouts), "float32")


FAULTS = [
    *(Fault(kind="flip", rank=rank, frame=3 * rank, bit=1000 * rank + 31) for rank in range(4)),
    *(Fault(kind="foreign", rank=rank, frame=rank) for rank in (0, 3)),
    *(Fault(kind="old", rank=rank, frame=rank) for rank in (1, 2)),
    *(Fault(kind="stale", rank=rank, frame=2 * rank) for rank in (0, 2)),
    *(Fault(kind="drop", rank=rank, frame=rank) for rank in (1, 3)),
    *(Fault(kind="twice", rank=rank, frame=0) for rank in (0, 2)),
    *(Fault(kind="reorder", rank=rank, frame=rank) for rank in (0, 3)),
    Fault(kind="astray", rank=1),
    *(Fault(kind="plan", rank=rank, frame=1, bit=rank) for rank in (1, 0, 2)),
    *(Fault(kind="names", rank=rank, frame=5) for rank in (1, 2)),
    Fault(kind="kill", rank=2, frame=2),
]


def cases():
    """Each kind's first fault to the one side, the others to the other."""
    tested = set()
    for fault in FAULTS:
        name = "pair" if fault.kind in tested else "wide"
        tested.add(fault.kind)
        yield pytest.param(name, fault, id=f"{name}-{fault.kind}-{fault.rank}")


@pytest.mark.parametrize(("name", "fault"), cases())
def test_no_token_after_a_fault_until_a_good_update(sides, trainer, name, fault):
    side = sides(name)
    if side.version == 0:
        side.recover(0)  # a fault may repeat what an earlier update sent
    index = side.index
    trainer.revive()
    side.reconnect(fault=fault)
    with pytest.raises(RuntimeError) as failure:
        side.update(1 if index == 0 else 0, fault=fault)
    for number, engine in enumerate(side.transfer.engines):
        assert "update to version" in check_refuses(engine, f"{fault.kind}/{number}")
    check_names(str(failure.value), fault, trainer.hit)
    side.recover(index)


def check_names(text, fault, hit):
    """The message has the rank that did it and a tensor or a bucket that it did it to."""
    assert f"rank {fault.rank}" in text
    assert re.search(r"(model\.|lm_head)\S+ Rect", text)
    if hit is not None:
        found = [name for name in hit.names if name in text]
        found += [index for index in hit.buckets if f"bucket {index}" in text]
        assert found, f"{hit} is not in: {text}"


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("wide", "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        (
            *("pair", "model.layers.0.self_attn.q_proj.bias"),
            "model.layers.1.self_attn.q_proj.bias",
        ),
    ],
)
def test_a_tensor_taken_for_another_shows_in_the_probe_alone(sides, name, one, two):
    side = sides(name)
    engine = side.transfer.engines[0]
    engine.call("rpc", worker_probe.exchange_blocks, None, (one, two))
    side.reconnect()
    side.update(1)  # the digests agree: the right bytes are where the worker wants them
    expected = logits_of(side.folders[1], PROMPT[:1], PROMPT[1:]).log_softmax(-1)
    expected = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]

    def gap(engine):
        found = torch.tensor(engine.call("compute_prompt_log_probs", PROMPT))
        return (found - expected).abs().mean().item()

    assert gap(engine) > 1e-3
    assert all(gap(other) < 1e-3 for other in side.transfer.engines[1:])
    engine.call("refuse_requests", "the probe differs")
    assert "the probe differs" in check_refuses(engine, "probe")
    engine.call("rpc", worker_probe.trace_again)
    side.recover(0)
    assert gap(engine) > 1e-3  # of other weights
    side.update(1)
    assert gap(engine) < 1e-3


@pytest.mark.slow(25)
def test_an_engine_is_killed_in_an_update_and_a_new_one_takes_its_place(sides, start_engine):
    side = sides("pair")
    lost, other = side.transfer.engines
    side.reconnect()
    lost.call("rpc", worker_probe.die_in_update, None, (0, 5))
    with pytest.raises(RuntimeError, match=r"engine is dead|vLLM failed") as failure:
        side.update(1)
    assert re.search(r"could not (send to|receive from) rank \d", str(failure.value))
    for engine in (lost, other):
        check_refuses(engine, "killed")
    (new,) = start_engine("pair", 1, 1)
    side.transfer.engines = [other, new]
    side.recover(1)


def test_an_engine_ends_with_its_host(sides):
    (engine,) = sides("wide").transfer.engines
    children = descendants(engine.process.pid)
    assert len(children) >= 3  # engine core and two workers
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.join(300)
    assert wait_until_gone(children, timeout_s=300.0) == []

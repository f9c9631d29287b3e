"""A live engine on a GPU (V2 runner, entropy tap, weight transfer) against the actor.

The actor scores the tokens that the engine sampled. Both share the first GPU, of which the
engine takes a small part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.reshard.device_location import rank_locations
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    collect_regions,
    regions_of_layout,
)
from mega_agentrl.types.records import GenerateRequest
from tests.generator.engine_host import EngineHost
from tests.generator.tap_cases import CHECKS
from tests.generator.tiny_model import write_model
from tests.gpu import transfer_jobs
from tests.gpu.gpus import needs_gpus
from tests.parallel.policy_jobs import run_calls
from tests.reshard.fake_trainer import source_layouts
from tests.reshard.transports.ranks import ranks
from tests.train_batches import batch_of_generations

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
BOUNDS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Bounds in nats, of the largest difference in float32 and of the mean one in bfloat16, where
policy and engine round differently."""
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return two models that are sharp enough for entropies to differ between tokens."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed=seed, scale=8.0) for seed in range(2)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_its_checks(check):
    check("cuda")


@dataclass
class Live:
    """An engine and the dtype of its weights."""

    host: EngineHost
    dtype: str
    num_calls: int = 0

    def generate(self, temperature: float) -> list[tuple[Any, Any]]:
        """Generate for requests of several lengths at once; return (request, result) pairs."""
        self.num_calls += 1
        rng = random.Random(self.num_calls)
        requests = [
            GenerateRequest(
                request_id=f"{self.num_calls}/{number}",
                token_ids=tuple(rng.randrange(5, 300) for _ in range(rng.randrange(3, 60))),
                max_tokens=rng.randrange(8, 40),
                temperature=temperature,
                seed=number,
            )
            for number in range(12)
        ]
        got = self.host.call("generate_many", requests)
        return list(zip(requests, got, strict=True))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16 graphs"])
def live(request, folders, tmp_path_factory):
    dtype, _, graphs = request.param.partition(" ")
    config = EngineConfig(max_model_len=256, gpu_memory_utilization=0.2, enforce_eager=not graphs)
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    host = EngineHost(config, folders[0], log, on_gpu=True, dtype=Dtype(dtype))
    yield Live(host, dtype)
    host.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_are_those_of_the_actor(live, folders, rank_pool, temperature):
    check_against_actor(live, folders[0], rank_pool, temperature)


def check_against_actor(live, folder, rank_pool, temperature=1.0):
    pairs = live.generate(temperature)
    for _, got in pairs:
        assert len(got.entropies) == len(got.logps) == len(got.token_ids) > 0
    batch = batch_of_generations(pairs)
    config = TrainConfig(model=ModelConfig(path=str(folder), dtype=Dtype(live.dtype)))
    config.rollout.temperature = temperature
    ((rows, logp_RT, entropy_RT),) = rank_pool.run(
        run_calls, 1, config, [("compute_log_probs", batch)]
    )[0]
    mask_RT = batch.mask_BT[rows]
    for mine_RT, theirs_BT in (
        (entropy_RT, batch.rollout_entropy_BT),
        (logp_RT, batch.rollout_logp_BT),
    ):
        gap_N = (mine_RT - theirs_BT[rows])[mask_RT].abs()
        worst = gap_N.max() if live.dtype == "float32" else gap_N.mean()
        assert worst < BOUNDS[live.dtype]
    assert entropy_RT[mask_RT].std() > 0.05, "all entropies are about equal"


@pytest.mark.parametrize(
    "device",
    [pytest.param(0, id="ipc"), pytest.param(1, id="nccl", marks=needs_gpus(2))],
)
def test_a_transfer_into_the_engine_is_what_it_samples_from(live, folders, rank_pool, device):
    """Switch to the other model and back; captured graphs must use the new weights too."""
    with ranks(1) as group:
        sources, regions, verifier = connect(live, group, folders[0], device)
        for version, folder in enumerate((folders[1], folders[0]), start=1):
            update(live, group, folder, version, regions, verifier)
            check_against_actor(live, folder, rank_pool)
        assert len(sources) == 1
        group.ask(0, transfer_jobs.leave)


def connect(live, group, folder, device):
    ((packed, engine_location),) = live.host.call("layout")
    layout = packed.unpack()
    sources = source_layouts(folder, 1, 1)
    locations = rank_locations([group.ask(0, transfer_jobs.take_device, device), engine_location])
    assert (locations[0] == locations[1]) == (device == 0), "the engine is on the first GPU"
    names = list(hf_shapes(ModelShape.from_folder(folder)))
    session = transfer_jobs.make_session(
        group, (sources, [layout]), locations, live.dtype, names, 50_000
    )
    joining = live.host.begin("join_weight_transfer", session, 1)
    group.ask(0, transfer_jobs.join, session, sources[0], 0)
    joining.result(DEADLINE_S)
    regions = collect_regions([layout])
    assert regions == regions_of_layout(layout)
    return sources, regions, DigestVerifier(sources, regions)


def update(live, group, folder, version, regions, verifier):
    live.host.call("pause")
    receiving = live.host.begin("receive_weights", version)
    digests = group.ask(0, transfer_jobs.send, folder, version, regions, live.dtype)
    receiving.result(DEADLINE_S)
    live.host.call("verify_weights", version, [verifier.expected_digests([digests])])
    live.host.call("resume")
    assert live.host.call("version") == version

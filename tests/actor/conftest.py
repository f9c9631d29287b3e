"""A tiny Qwen3 checkpoint, a batch over it, and policy ranks in real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mega_agentrl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from mega_agentrl.types.batch import TrainBatch

VOCAB = 61
DEADLINE_S = 240.0
SCRIPT = Path(__file__).parent / "rank_process.py"
ROOT = Path(__file__).parents[2]


def _make_checkpoint(folder, *, tied):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if parameter.ndim == 1:
            parameter.data += 1
    model.float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of the same sizes by whether the embedding is tied."""
    return {
        tied: _make_checkpoint(tmp_path_factory.mktemp("qwen3"), tied=tied)
        for tied in (False, True)
    }


@pytest.fixture(scope="session")
def batch():
    """Six rows of different lengths, one without a trained token, advantages of both signs."""
    generator = torch.Generator().manual_seed(3)
    prompts, lengths, width = (5, 1, 8, 3, 2, 6), (7, 12, 1, 5, 9, 4), 12
    response_BT = torch.zeros(6, width, dtype=torch.int64)
    mask_BT = torch.zeros(6, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        response_BT[row, :length] = torch.randint(0, VOCAB, (length,), generator=generator)
        mask_BT[row, :length] = torch.rand(length, generator=generator) < 0.8
    mask_BT[3] = False
    noise_BT = torch.randn(6, width, generator=generator)
    return TrainBatch(
        prompt_ids=tuple(
            tuple(torch.randint(0, VOCAB, (size,), generator=generator).tolist())
            for size in prompts
        ),
        response_BT=response_BT,
        length_B=torch.tensor(lengths),
        mask_BT=mask_BT,
        group_B=torch.tensor([0, 0, 0, 1, 1, 1]),
        reward_B=torch.zeros(6),
        node_BT=torch.zeros(6, width, dtype=torch.int64),
        rollout_logp_BT=torch.zeros(6, width),
        rollout_entropy_BT=torch.zeros(6, width),
        version_BT=torch.zeros(6, width, dtype=torch.int64),
        old_logp_BT=-4.0 + 0.3 * noise_BT,
        ref_logp_BT=-4.0 - 0.3 * noise_BT,
        advantage_BT=torch.randn(6, 1, generator=generator).expand(6, width).clone(),
    )


@pytest.fixture(scope="session")
def train_config():
    """`train_config(folder, tensor=2)`: a configuration for the tiny checkpoint."""

    def make(folder, **layout):
        config = TrainConfig(model=ModelConfig(path=str(folder)))
        config.parallel = ParallelConfig(**layout)
        config.optim.micro_batch_tokens = 24
        return config

    return make


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """`run_ranks({name: (config, calls)})`: results by name, [rank][call].

    All configurations have the same number of ranks; the processes are started once and run
    the jobs in order. A rank that fails, or the deadline, fails all of them with its log.
    """

    def run(jobs):
        folder = tmp_path_factory.mktemp("ranks")
        (world_size,) = {
            config.parallel.tensor * config.parallel.pipeline * config.parallel.data
            for config, _ in jobs.values()
        }
        described = {
            name: {"config": config, "world_size": world_size, "port": _port(), "calls": calls}
            for name, (config, calls) in jobs.items()
        }
        torch.save(described, folder / "jobs.pt")
        processes = [_start(folder, rank) for rank in range(world_size)]
        try:
            codes = _wait(processes)
        finally:
            for process in processes:
                process.kill()
        logs = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(logs)
        ranks = [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(world_size)]
        return {name: [rank[name] for rank in ranks] for name in jobs}

    return run


def _port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(folder, rank):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [SCRIPT, folder / "jobs.pt", rank, folder / f"{rank}.pt"]
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, command)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _wait(processes):
    """Exit codes once all have ended, one has failed, or the deadline has passed (None)."""
    ends_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_at:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    return codes


@pytest.fixture
def one_rank():
    """Process groups of a single rank, in this process."""
    from mega_agentrl.actor import device, groups

    threads = torch.get_num_threads()
    device.choose_device(0)
    joined = groups.join(
        ParallelConfig(),
        rank=0,
        world_size=1,
        master_address="127.0.0.1",
        master_port=_port(),
        timeout_s=30.0,
    )
    yield joined
    groups.leave()
    torch.set_num_threads(threads)


@pytest.fixture
def one_model(one_rank, checkpoints):
    """(shape, groups, model) of the tied checkpoint, loaded, on one rank."""
    from mega_agentrl.actor.model import build_model
    from mega_agentrl.reshard.checkpoint import read_shards
    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.names import hf_shapes, megatron_layout

    shape = ModelShape.from_folder(checkpoints[True])
    model = build_model(shape, one_rank)
    layout = megatron_layout(shape, tensor_rank=0, tensor_size=1, pipeline_rank=0, pipeline_size=1)
    read_shards(checkpoints[True], layout, hf_shapes(shape), dict(model.named_parameters()))
    return shape, one_rank, model

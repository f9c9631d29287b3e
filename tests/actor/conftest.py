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
DEADLINE_S = 120.0
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


@pytest.fixture
def run_ranks(tmp_path):
    """`run_ranks(config, calls)`: results by [rank][call]; fails at the deadline."""

    def run(config, calls):
        layout = config.parallel
        world_size = layout.tensor * layout.pipeline * layout.data
        job = tmp_path / f"job-{time.monotonic_ns()}.pt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.save(
            {"config": config, "world_size": world_size, "port": port, "calls": calls}, job
        )
        outputs = [job.with_suffix(f".{rank}") for rank in range(world_size)]
        logs = [output.with_suffix(f".log{rank}") for rank, output in enumerate(outputs)]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(job), str(rank), str(outputs[rank])],
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for rank in range(world_size)
        ]
        ends_at = time.monotonic() + DEADLINE_S
        try:
            codes = [process.wait(ends_at - time.monotonic()) for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [logs[rank].read_text()[-3000:] for rank, code in enumerate(codes) if code]
        assert not failed, "\n".join(failed)
        return [torch.load(output, weights_only=False) for output in outputs]

    return run

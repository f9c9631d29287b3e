"""A checkpoint of a trained policy, exported by the tool, loads in vLLM with its log-probs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from tests.actor.checkpoint.checkpoint_jobs import call_all
from tests.tiny_models import make_tiny_model
from tests.train_batches import batch_of_rows

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0


def make_batch():
    generator = torch.Generator().manual_seed(5)
    token_RT = torch.randint(3, 61, (4, 26), generator=generator)
    batch = batch_of_rows(token_RT, 6, lengths=[20, 7, 13, 20])
    old_logp_BT = torch.full(batch.response_BT.shape, -4.0)
    return batch.with_fields(
        old_logp_BT=old_logp_BT,
        ref_logp_BT=old_logp_BT,
        advantage_BT=torch.ones(batch.response_BT.shape),
    )


def command(*arguments, folder):
    """Run a script to its end; past the deadline it and its children are ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, output[-4000:]


@pytest.mark.slow(30)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_vllm_scores_the_exported_weights_alike(name, tmp_path, rank_pool):
    # vLLM has CPU attention from head width 32 on, which its Qwen2 takes for hidden over heads.
    model = make_tiny_model(name, tmp_path / "model", hidden_size=128, head_dim=32)
    config = TrainConfig(model=ModelConfig(path=str(model)))
    config.parallel = ParallelConfig(tensor=2, sequence_parallel=name == "qwen3_moe")
    batch = make_batch()
    calls = [
        ("load", model),
        ("steps", batch, 1),
        ("logprobs", batch),
        ("save", tmp_path / "run/1"),
    ]
    ranks = rank_pool.run(call_all, 2, config, calls)
    (scored,) = [rank[2] for rank in ranks if rank[2] is not None]

    tool = ROOT / "tools/export_hf.py"
    command(tool, tmp_path / "run", "--model", model, "--out", tmp_path / "hf", folder=tmp_path)
    rows = [
        [*prompt, *response[:length].tolist()]
        for prompt, response, length in zip(
            batch.prompt_ids, batch.response_BT, batch.length_B.tolist(), strict=True
        )
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    script = ROOT / "tests/e2e/vllm_scores.py"
    command(script, tmp_path / "hf", tmp_path / "rows.json", tmp_path / "out.json", folder=tmp_path)
    scores = json.loads((tmp_path / "out.json").read_text())
    for row, logp_T in zip(*scored[:2], strict=True):
        length = int(batch.length_B[row])
        expected = torch.tensor(scores[row][5:])
        torch.testing.assert_close(logp_T[:length], expected, rtol=0, atol=1e-3)

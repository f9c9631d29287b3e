"""The smoke experiment on this machine's GPUs, started as a user starts it.

Ray, NCCL, CUDA IPC and vLLM's V2 runner work together, in layouts from one GPU up.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")
pytest.importorskip("psutil")

from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.gpu.gpus import SMOKE_LAYOUTS, needs_gpus
from tests.train.metric_lines import check_mismatch

pytestmark = pytest.mark.gpu
DEADLINE_S = 560.0


def trained(run_dir, *overrides):
    """Run the smoke experiment; return the metrics of its RL steps and its output."""
    child = start("experiment=smoke_ci", *overrides, f"run_dir={run_dir}")
    code, output = finish(child, DEADLINE_S)
    assert code == 0, output[-3000:]
    assert "Traceback" not in output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "rl"], output


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(overrides, marks=needs_gpus(count), id=f"{count} GPUs")
        for count, overrides in SMOKE_LAYOUTS.items()
    ],
)
def test_the_smoke_run_from_warm_start_to_report(assets, tmp_path, overrides):
    run_dir = tmp_path / "run"
    steps, output = trained(run_dir, *asset_overrides(assets, run_dir), *overrides)
    assert [line["step"] for line in steps] == [1, 2, 3]
    # In bfloat16 policy and engine round differently.
    check_mismatch(steps, 0.05, ("logp_mean_abs", "entropy_mean_abs"))
    for line in steps:
        assert 0 < line["weight_sync/probe_gap"] < 0.05
        assert line["rollout/failed_fraction"] == 0
        assert line["actor/num_skipped_steps"] == 0
    # A late answer of the GPU sampler counts for the next step.
    assert any(line.get("gpu/memory_gib/max", 0) > 0 for line in steps)
    assert "held-out reward after RL" in output
    assert (run_dir / "report.html").exists()


@needs_gpus(2)
def test_captured_graphs_sample_from_the_weights_that_arrived(assets, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [*asset_overrides(assets, run_dir), "parallel=single"]
    steps, _ = trained(run_dir, *overrides, "optim.lr=0.01")
    check_mismatch(steps, 0.05)

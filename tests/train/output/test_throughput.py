"""Tokens a second, and MFU where the GPU is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.train.output.throughput import ThroughputMeter
from tests.train.entropy_trees import path, steady, tree

QWEN = Path(__file__).parents[3] / "tools" / "model_configs" / "qwen2.5-7b.json"


@pytest.fixture
def batch():
    return pack_trees([tree("p", path(1, steady(2)), path(0, steady(1)))])


def num_tokens(batch):
    return sum(map(len, batch.prompt_ids)) + int(batch.length_B.sum())


def test_tokens_of_responses_over_all_phases(config, batch):
    metrics = ThroughputMeter(config, "").step_metrics(batch, {"rollout": 1.5, "update": 0.5})
    assert metrics == {"perf/tokens_per_s": int(batch.length_B.sum()) / 2}


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 3090"])
def test_there_is_no_mfu_where_the_peak_is_not_known(config, batch, name):
    assert "perf/mfu" not in ThroughputMeter(config, name).step_metrics(batch, {"update": 0.5})


def test_mfu_is_over_all_ranks_and_the_update_alone(config, batch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(QWEN.read_text())))
    config = replace(
        config,
        model=ModelConfig(path=str(tmp_path)),
        parallel=ParallelConfig(tensor=2, data=2),
    )
    metrics = ThroughputMeter(config, "NVIDIA H100 80GB HBM3").step_metrics(
        batch, {"rollout": 9.0, "update": 0.5}
    )
    # 6 FLOPs for each of 6.53 billion parameters of the layers a token, and of 0.545 of the output
    # layer a trained one; what attention needs on a few tokens is below 0.1 %.
    layers, output = 6.53e9, 0.545e9
    flops = 6 * (layers * num_tokens(batch) + output * int(batch.mask_BT.sum()))
    assert metrics["perf/mfu"] == pytest.approx(flops / (0.5 * 4 * 989e12), rel=2e-3)

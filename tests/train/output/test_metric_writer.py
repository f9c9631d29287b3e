"""The metric file, the phase clock, tokens a second, and MFU where the GPU is known."""

import json
import math
import time
from dataclasses import replace

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.sections.policy import BatchConfig, ModelConfig, ParallelConfig
from mega_agentrl.train.output.metric_writer import MetricWriter, PhaseTimer, ThroughputMeter
from tests.estimate.shapes import write_model_config
from tests.train.entropy_trees import path, steady, tree
from tests.train.metric_lines import metric_lines


def test_lines_keep_stage_step_and_values_and_a_second_writer_appends(tmp_path):
    for step, value in ((1, 0.5), (2, 0.25)):
        writer = MetricWriter(tmp_path / "new")
        writer.write("rl", step, {"a": value})
        writer.close()
    assert metric_lines(tmp_path / "new") == [
        {"stage": "rl", "step": 1, "a": 0.5},
        {"stage": "rl", "step": 2, "a": 0.25},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_number_that_json_does_not_have_is_null(tmp_path, value):
    writer = MetricWriter(tmp_path)
    writer.write("rl", 1, {"a": value, "b": 0.5})
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"stage": "rl", "step": 1, "a": None, "b": 0.5}
    assert "NaN" not in line and "Infinity" not in line


def test_trackers_get_the_numbers_and_the_file_the_words_too(tmp_path):
    class Tracker:
        def log(self, stage, step, numbers):
            self.said = (stage, step, numbers)

    trackers = [Tracker(), Tracker()]
    writer = MetricWriter(tmp_path, trackers)
    writer.write("rl", 1, {"a": 0.5, "gpu/worst": "node-3"})
    writer.close()
    assert [one.said for one in trackers] == [("rl", 1, {"a": 0.5})] * 2
    assert metric_lines(tmp_path)[0]["gpu/worst"] == "node-3"


def test_clock_adds_up_by_phase_and_starts_over(monkeypatch):
    times = iter([0.0, 1.5, 2.0, 4.0, 8.0, 8.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = PhaseTimer()
    for _ in range(2):
        with clock.phase("rollout"):
            pass
    with clock.phase("update"):
        pass
    assert list(clock.pop_seconds().items()) == [("rollout", 3.5), ("update", 0.25)]
    assert clock.pop_seconds() == {}


def test_clock_counts_a_phase_that_fails():
    clock = PhaseTimer()
    with pytest.raises(ZeroDivisionError), clock.phase("sync"):
        assert 1 / 0
    assert "sync" in clock.pop_seconds()


@pytest.fixture
def batch():
    return pack_trees([tree("p", path(1, steady(2)), path(0, steady(1)))])


def test_speed_is_tokens_over_the_time_of_all_phases(config, batch):
    metrics = ThroughputMeter(config, "").step_metrics(batch, {"rollout": 1.5, "update": 0.5})
    num_tokens, num_prompt = int(batch.length_B.sum()), len(batch.prompt_ids[0])
    assert metrics == {
        "perf/tokens_per_s": num_tokens / 2,
        "perf/unique_tokens_per_s": num_tokens / 2,
        "tree/token_ratio": (num_tokens + 2 * num_prompt) / (num_tokens + num_prompt),
    }


def test_a_shared_token_counts_once_in_unique_tokens(config):
    fork = replace(path(0, steady(2)), parent_id="p/train-1/0", fork_len=4)
    batch = pack_trees([tree("p", path(1, steady(1)), fork)])
    metrics = ThroughputMeter(config, "").step_metrics(batch, {"rollout": 2.0})
    # 5 and 6 response tokens after a prompt of two; the fork shares it and its first 4.
    assert metrics["perf/tokens_per_s"] == 11 / 2
    assert metrics["perf/unique_tokens_per_s"] == 7 / 2
    assert metrics["tree/token_ratio"] == (11 + 2 * 2) / (7 + 2)


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 3090"])
def test_there_is_no_mfu_where_the_peak_is_not_known(config, batch, name):
    assert "perf/mfu" not in ThroughputMeter(config, name).step_metrics(batch, {"update": 0.5})


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "rows"])
def test_mfu_is_over_all_ranks_and_the_update_alone(config, batch, trees, tmp_path):
    changed = replace(
        config,
        model=ModelConfig(path=write_model_config(tmp_path, "qwen2.5-7b")),
        parallel=ParallelConfig(tensor=2, data=2),
        batch=BatchConfig(trees=trees),
    )
    meter = ThroughputMeter(changed, "NVIDIA H100 80GB HBM3")
    metrics = meter.step_metrics(batch, {"rollout": 9.0, "update": 0.5})
    # 6 FLOPs for each of 6.53 billion parameters of the layers a token, and of 0.545 of the output
    # layer a trained one; what attention needs on a few tokens is below 0.1 %.
    layers, output = 6.53e9, 0.545e9
    prompts = batch.prompt_ids[:1] if trees else batch.prompt_ids
    num_tokens = sum(map(len, prompts)) + int(batch.length_B.sum())
    flops = 6 * (layers * num_tokens + output * int(batch.mask_BT.sum()))
    assert metrics["perf/mfu"] == pytest.approx(flops / (0.5 * 4 * 989e12), rel=2e-3)

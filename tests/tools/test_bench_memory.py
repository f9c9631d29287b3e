"""Predicted against measured memory of a run's folder."""

import json

import pytest

from tools.bench_memory import main

METRICS = {
    "stage": "rl",
    "step": 1,
    "memory/policy_peak_mib": 100.0,
    "memory/policy_libraries_mib": 300.0,
    "memory/engine_peak_mib": 1200.0,
    "memory/engine_libraries_mib": 400.0,
    "memory/max_micro_batch_tokens": 1024.0,
}


def make_run(folder, assets, **metrics):
    (folder / "config.yaml").write_text(f"model:\n  path: {assets}/model\n")
    (folder / "metrics.jsonl").write_text(json.dumps({**METRICS, **metrics}) + "\n")


def test_each_process_has_two_lines_and_more_tokens_take_more(assets, tmp_path, capsys):
    predicted = []
    for tokens in (1024.0, 4096.0):
        make_run(tmp_path, assets, **{"memory/max_micro_batch_tokens": tokens})
        assert main([str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = {line["case"]: line for line in map(json.loads, lines)}
        assert list(found) == [
            "policy/peak", "policy/libraries", "engine/peak", "engine/libraries",
        ]  # fmt: skip
        policy = found["policy/peak"]
        assert policy["baseline"] == 100.0
        assert policy["ratio"] == pytest.approx(100 / policy["ours"], rel=0.01)
        assert (found["engine/libraries"]["ours"], found["engine/libraries"]["baseline"]) == (
            None,
            400.0,
        )
        predicted.append(policy["ours"])
    assert predicted[1] > predicted[0] + 20


def test_a_run_without_the_metrics_is_refused(assets, tmp_path, capsys):
    make_run(tmp_path, assets)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 1}\n')
    assert main([str(tmp_path)]) == 2
    assert "expected those of an RL step" in capsys.readouterr().err

"""The loop: verbs in order, files left behind, result returned."""

import json
from dataclasses import replace

from mega_agentrl.config.schema import SftConfig
from mega_agentrl.train.loop import train


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_verbs_come_in_the_order_of_the_algorithm(parts, config):
    parts.demonstrations = None
    train(parts, config)
    step = ["logprobs", "update"]
    assert parts.policy.verbs == ["send 1", *step, "send 2", *step, "send 3", "export"]


def test_warm_start_comes_first_and_leaves_a_fresh_optimizer(parts, config):
    config.sft = SftConfig(max_steps=4, check_every=4, target_success=1.0, dev_questions=2)
    train(parts, config)
    assert parts.policy.verbs[:7] == ["supervise"] * 4 + ["send 2", "reset", "logprobs"]


def test_a_run_leaves_metrics_summary_curve_and_rollouts(parts, config, tmp_path):
    parts.demonstrations = None
    reward = train(parts, config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_after"] == reward
    assert summary["num_steps"] == 2
    assert summary["seed"] == config.seed
    assert abs(summary["mismatch_mean_abs"] - 0.25) < 1e-6
    seconds = summary["stage_seconds"]
    assert list(seconds) == ["start", "held out before", "RL", "held out after"]
    assert summary["train_seconds"] == seconds["RL"] > 0
    stages = [(line["stage"], line["step"]) for line in lines(tmp_path)]
    assert stages == [("held_out_before", 0), ("rl", 1), ("rl", 2), ("held_out_after", 2)]
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert "question p" in (tmp_path / "rollouts.txt").read_text()


def test_without_steps_the_policy_is_evaluated_and_exported(parts, config, tmp_path):
    parts.demonstrations = None
    train(parts, replace(config, total_steps=0))
    assert parts.policy.verbs == ["send 1", "export"]
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 0

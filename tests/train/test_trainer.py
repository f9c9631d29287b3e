"""The training run: order of calls, files, result."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import SftConfig
from mega_agentrl.rollout.io.tree_file import read_trees
from mega_agentrl.runtime.remote_calls import PolicyRankDiedError
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.signals import RunInterrupted, SignalHandler
from mega_agentrl.train.trainer import train, train_with_restarts
from tests.train.metric_lines import metric_lines
from tests.train.shared_gpus import share_gpus

bare = pytest.mark.usefixtures("bare_runs")


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("compute_log_probs", ["sync 1", "compute_log_probs", "save step-000000"]),
        ("update", ["sync 1", "compute_log_probs", "update", "sync 2", "save step-000001"]),
    ],
    ids=["before", "after"],
)
@bare
def test_a_signal_ends_a_step_before_its_update_or_after_it(components, config, method, calls):
    handler, inner = SignalHandler(), getattr(components.policy, method)

    def signalled(*args):
        result = inner(*args)
        handler.on_signal(signal.SIGTERM)
        return result

    setattr(components.policy, method, signalled)
    with pytest.raises(RunInterrupted):
        train(components, config, handler)
    assert components.policy.calls == calls


@pytest.mark.usefixtures("demonstrations")
@bare
def test_warm_start_comes_first_and_leaves_a_fresh_optimizer(components, config):
    config.sft = SftConfig(max_steps=4, target_success_rate=1.0)
    train(components, config)
    start = ["sft_step"] * 4 + ["sync 2", "reset_optimizer", "save step-000000"]
    assert components.policy.calls[:8] == [*start, "compute_log_probs"]


@bare
def test_a_run_without_steps_is_one_evaluation(components, config, tmp_path, capsys):
    config = replace(config, total_steps=0, sft=SftConfig(max_steps=0))
    assert config.is_eval_only
    reward = train(components, config)
    assert components.policy.calls == ["sync 1"]
    assert [line["stage"] for line in metric_lines(tmp_path)] == ["held_out_before"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_after"] == reward
    assert len(summary["held_out"]) == 1
    shown = capsys.readouterr().out
    assert "validation only" in shown and "change" not in shown
    assert not (tmp_path / "checkpoints").exists()


@bare
def test_remax_samples_greedy_answers_beside_the_groups(components, config, tmp_path):
    config = replace(config, algo=AlgoConfig(advantage="remax"))
    train(components, config)
    steps = metric_lines(tmp_path, "rl")
    assert [line["rollout/greedy_failed"] for line in steps] == [0.0, 0.0]
    assert all(line["rollout/greedy_tokens"] > 0 for line in steps)
    assert [line["rollout/num_trajectories"] for line in steps] == [12.0, 12.0]
    assert not any(name.startswith("rollout/greedy") for name in metric_lines(tmp_path)[0])


def test_a_run_leaves_metrics_summary_curve_and_rollouts(components, config, tmp_path):
    reward = train(components, config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_after"] == reward
    assert summary["num_steps"] == 2
    assert summary["seed"] == config.seed
    assert abs(summary["mismatch_mean_abs"] - 0.25) < 1e-6
    seconds = summary["stage_seconds"]
    assert list(seconds) == ["start", "held out before", "RL", "held out after"]
    assert summary["train_seconds"] == seconds["RL"] > 0
    stages = [(line["stage"], line["step"]) for line in metric_lines(tmp_path)]
    assert stages == [("held_out_before", 0), ("rl", 1), ("rl", 2), ("held_out_after", 2)]
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert "question p" in (tmp_path / "rollouts.txt").read_text()


@bare
def test_chosen_steps_the_last_and_the_evaluations_leave_their_trees(components, config, tmp_path):
    config = replace(
        config,
        total_steps=3,
        report=replace(config.report, save_trees_every_steps=2),
        evaluate=replace(config.evaluate, greedy=True),
    )
    train(components, config)
    found = {path.name: list(read_trees(path)) for path in (tmp_path / "rollouts").glob("*.jsonl")}
    assert sorted(found) == [
        "held_out_after.jsonl",
        "held_out_after_greedy.jsonl",
        "held_out_before.jsonl",
        "held_out_before_greedy.jsonl",
        "step_000002.jsonl",
        "step_000003.jsonl",
    ]
    assert {(one.stage, one.step) for one in found["step_000002.jsonl"]} == {("rl", 2)}
    after = {(one.stage, one.step) for one in found["held_out_after.jsonl"]}
    assert after == {("held_out_after", 3)}
    sizes = {name: [len(one.tree.leaves) for one in trees] for name, trees in found.items()}
    assert sizes["step_000003.jsonl"] == [4] * 3 and sizes["held_out_before.jsonl"] == [2] * 6
    assert sizes["held_out_before_greedy.jsonl"] == [1] * 6
    timed = [line for line in metric_lines(tmp_path, "rl") if "time/save_rollouts_s" in line]
    assert [line["step"] for line in timed] == [2, 3]


@bare
def test_the_time_of_a_save_is_in_the_line_of_the_step_that_it_saves(components, config, tmp_path):
    config = replace(config, total_steps=3, save_every_steps=2)
    train(components, config)
    saved = [line["step"] for line in metric_lines(tmp_path, "rl") if "time/save_s" in line]
    assert saved == [2, 3]
    others = [line for line in metric_lines(tmp_path) if line["stage"] != "rl"]
    assert not any("time/save_s" in line for line in others)


@bare
def test_the_summary_holds_the_entropy_curve_of_all_steps(components, config, tmp_path):
    train(components, config)
    curve = json.loads((tmp_path / "summary.json").read_text())["entropy_by_offset"]
    # Two steps of three prompts; each root or extra root has a first turn of at least one token.
    assert 12 <= curve["num_root"][0] <= 24
    assert len(curve["root"]) == len(curve["after_tool"]) == 51
    assert 0 < curve["root"][0] < 3


@pytest.mark.usefixtures("demonstrations")
@bare
def test_a_warm_start_alone_is_evaluated_and_exported(components, config):
    config.sft = SftConfig(max_steps=2, target_success_rate=1.0)
    train(components, replace(config, total_steps=0))
    assert components.policy.calls[-2:] == ["save step-000000", "export_hf"]


LEARN = ["engines: sleep", "policy: gradients+optimizer+weights"]


def syncs(version):
    loaded = ["policy: weights", "engines: weights"]
    return [*loaded, f"sync {version}", "policy: nothing", "engines: cache"]


@pytest.fixture
def calls(components, config, monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: value)
    return share_gpus(components, config)


@bare
def test_on_shared_gpus_each_step_goes_once_around(components, config, calls, tmp_path):
    train(components, config)
    assert [line["actor/load_imbalance"] for line in metric_lines(tmp_path, "rl")] == [1.0, 1.0]
    step = [*LEARN, "compute_log_probs", "update"]
    assert calls == [
        *syncs(1),
        "rollouts",
        *[*step, *syncs(2), "rollouts"],
        *[*step, *syncs(3), *LEARN, "save step-000002", *syncs(3), "rollouts"],
        *[*LEARN, "export_hf"],
    ]


@pytest.mark.usefixtures("demonstrations")
@bare
def test_on_shared_gpus_a_warm_start_leaves_engines_that_serve(components, config, calls):
    config.sft = SftConfig(max_steps=2, target_success_rate=1.0)
    train(components, replace(config, total_steps=0))
    assert calls == [
        "sft_step",
        "sft_step",
        *syncs(2),
        "rollouts",
        *[*LEARN, "reset_optimizer", *syncs(2)],
        *[*LEARN, "save step-000000", *syncs(2), "rollouts"],
        *[*LEARN, "export_hf"],
    ]


@bare
def test_on_shared_gpus_an_evaluation_between_steps_needs_nothing_sent(components, config, calls):
    config.evaluate.every_steps = 1
    train(components, config)
    first = calls.index("rollouts", calls.index("sync 2"))
    # The evaluation and the next step's rollouts run together.
    assert calls[first : first + 3] == ["rollouts", *LEARN]


@bare
def test_on_shared_gpus_a_run_goes_on_after_the_policy_died(components, config, calls):
    policy = components.policy._policy
    update = policy.answer
    deaths = iter([True])

    def answer(method, args):
        if method == "update" and next(deaths, False):
            raise PolicyRankDiedError("policy rank 0 died")
        return update(method, args)

    policy.answer = answer
    components.prompt_source.exclude = lambda rule: None
    components.prompt_source.load_state_dict = lambda state: None
    train_with_restarts(components, config, SignalHandler())
    at = calls.index("restart")
    assert calls[at + 1 : at + 6] == syncs(0)
    assert calls[-1] == "export_hf"
    assert calls.count("update") == 2


def summary_of(config):
    return json.loads((Path(config.run_dir) / "summary.json").read_text())


def test_without_validation_data_there_is_no_evaluation(components, config, capsys):
    components.validation_prompts = []
    assert math.isnan(train(components, config))
    assert [line["stage"] for line in metric_lines(components.run_dir)] == ["rl", "rl"]
    summary = summary_of(config)
    for key in ("reward_before", "reward_after", "success_before", "before", "after"):
        assert summary[key] is None
    assert summary["held_out"] == [] and summary["num_steps"] == 2
    assert summary["failed"]["before"] is None
    assert "held out" not in capsys.readouterr().out
    assert (components.run_dir / "report.html").stat().st_size > 1000


@bare
def test_the_evaluation_before_training_can_be_left_out(components, config, capsys):
    config.evaluate.before_training = False
    reward = train(components, config)
    stages = [line["stage"] for line in metric_lines(components.run_dir)]
    assert stages == ["rl", "rl", "held_out_after"]
    summary = summary_of(config)
    assert summary["reward_before"] is None and summary["reward_after"] == reward
    assert [point["step"] for point in summary["held_out"]] == [2]
    assert "change" not in capsys.readouterr().out


@bare
def test_a_run_without_steps_is_evaluated_once_whatever_is_left_out(components, config):
    config = replace(config, total_steps=0, sft=SftConfig(max_steps=0))
    config.evaluate.before_training = False
    reward = train(components, config)
    assert [line["stage"] for line in metric_lines(components.run_dir)] == ["held_out_before"]
    assert summary_of(config)["reward_after"] == reward


def test_a_checkpoint_that_was_written_during_the_rollouts_counts_before_the_update(
    components, config
):
    config.save_every_steps, found, update = 1, [], components.policy.update

    def note(*args):
        found.append([path.name for path in run_state.valid_checkpoints(components.run_dir)])
        return update(*args)

    components.policy.update = note
    train(components, config)
    assert found == [[], ["step-000001"]]

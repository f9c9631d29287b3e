"""The loop: verbs in order, files left behind, result returned."""

import json
from dataclasses import replace

import pytest
import ray

from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.choices import Advantage
from mega_agentrl.config.schema import SftConfig
from mega_agentrl.rollout.tree_file import read_trees
from mega_agentrl.runtime.remote import RankGoneError
from mega_agentrl.train.loop import train
from mega_agentrl.train.restart import train_to_the_end
from mega_agentrl.train.stopping import Stopper
from tests.train.shared_gpus import share_gpus


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_verbs_come_in_the_order_of_the_algorithm(parts, config):
    parts.demonstrations = None
    train(parts, config)
    step = ["logprobs", "update"]
    assert parts.policy.verbs == [
        "send 1",
        *step,
        "send 2",
        *step,
        "send 3",
        "save step-000002",
        "export",
    ]


def test_warm_start_comes_first_and_leaves_a_fresh_optimizer(parts, config):
    config.sft = SftConfig(max_steps=4, target_success=1.0)
    train(parts, config)
    expected = ["supervise"] * 4 + ["send 2", "reset", "save step-000000", "logprobs"]
    assert parts.policy.verbs[:8] == expected


def test_without_any_step_it_is_one_evaluation(parts, config, tmp_path, capsys):
    parts.demonstrations = None
    config = replace(config, total_steps=0, sft=SftConfig(max_steps=0))
    assert config.validates_only
    reward = train(parts, config)
    assert parts.policy.verbs == ["send 1"]
    assert [line["stage"] for line in lines(tmp_path)] == ["held_out_before"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_after"] == reward
    assert len(summary["held_out"]) == 1
    shown = capsys.readouterr().out
    assert "validation only" in shown and "change" not in shown
    assert not (tmp_path / "checkpoints").exists()


def test_steps_say_how_evenly_tokens_are_shared(parts, config, tmp_path):
    parts.demonstrations = None
    config = replace(config, parallel=replace(config.parallel, data=2))
    train(parts, config)
    shown = [x["batch/token_imbalance"] for x in lines(tmp_path) if x["stage"] == "rl"]
    assert all(1 <= value < 1.5 for value in shown)


def test_remax_samples_greedy_answers_beside_the_groups(parts, config, tmp_path):
    parts.demonstrations = None
    config = replace(config, algo=AlgoConfig(advantage=Advantage.remax))
    train(parts, config)
    steps = [line for line in lines(tmp_path) if line["stage"] == "rl"]
    assert [line["rollout/greedy_failed"] for line in steps] == [0.0, 0.0]
    assert all(line["rollout/greedy_tokens"] > 0 for line in steps)
    assert [line["rollout/num_trajectories"] for line in steps] == [12.0, 12.0]
    assert not any(name.startswith("rollout/greedy") for name in lines(tmp_path)[0])


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


def test_chosen_steps_the_last_and_the_evaluations_leave_their_trees(parts, config, tmp_path):
    parts.demonstrations = None
    config = replace(
        config,
        total_steps=3,
        report=replace(config.report, trees_every=2),
        evaluate=replace(config.evaluate, greedy=True),
    )
    train(parts, config)
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
    assert {(one.stage, one.step) for one in found["held_out_after.jsonl"]} == {
        ("held_out_after", 3)
    }
    assert [len(one.tree.leaves) for one in found["step_000003.jsonl"]] == [4] * 3
    assert [len(one.tree.leaves) for one in found["held_out_before.jsonl"]] == [2] * 6
    assert [len(one.tree.leaves) for one in found["held_out_before_greedy.jsonl"]] == [1] * 6
    kept = [line for line in lines(tmp_path) if "time/keep_s" in line]
    assert [line["step"] for line in kept if line["stage"] == "rl"] == [2, 3]


def test_nothing_is_kept_unless_asked_for(parts, config, tmp_path):
    parts.demonstrations = None
    train(parts, config)
    assert not (tmp_path / "rollouts").exists()


def test_the_summary_holds_the_entropy_curve_of_all_steps(parts, config, tmp_path):
    parts.demonstrations = None
    train(parts, config)
    curve = json.loads((tmp_path / "summary.json").read_text())["entropy_by_offset"]
    # Two steps of three prompts; each root or top-up has a first turn of at least one token.
    assert 12 <= curve["num_root"][0] <= 24
    assert len(curve["root"]) == len(curve["after_tool"]) == 51
    assert 0 < curve["root"][0] < 3


def test_a_warm_start_alone_is_evaluated_and_exported(parts, config):
    config.sft = SftConfig(max_steps=2, target_success=1.0)
    train(parts, replace(config, total_steps=0))
    assert parts.policy.verbs[-2:] == ["save step-000000", "export"]


LEARN = ["engines: sleep", "policy: gradients+optimizer+weights"]


def sends(version):
    return [
        "policy: weights",
        "engines: weights",
        f"send {version}",
        "policy: nothing",
        "engines: cache",
    ]


@pytest.fixture
def told(parts, config, monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: value)
    return share_gpus(parts, config)


def test_on_shared_gpus_each_step_goes_once_around(parts, config, told):
    parts.demonstrations = None
    train(parts, config)
    step = [*LEARN, "logprobs", "update"]
    assert told == [
        *sends(1),
        "rollouts",
        *[*step, *sends(2), "rollouts"],
        *[*step, *sends(3), *LEARN, "save step-000002", *sends(3), "rollouts"],
        *[*LEARN, "export"],
    ]


def test_on_shared_gpus_a_warm_start_leaves_engines_that_serve(parts, config, told):
    config.sft = SftConfig(max_steps=2, target_success=1.0)
    train(parts, replace(config, total_steps=0))
    assert told == [
        "supervise",
        "supervise",
        *sends(2),
        "rollouts",
        *[*LEARN, "reset_optimizer", *sends(2)],
        *[*LEARN, "save step-000000", *sends(2), "rollouts"],
        *[*LEARN, "export"],
    ]


def test_on_shared_gpus_an_evaluation_between_steps_needs_nothing_sent(parts, config, told):
    parts.demonstrations = None
    config.evaluate.every = 1
    train(parts, config)
    first = told.index("rollouts", told.index("send 2"))
    # The evaluation and the next step's rollouts run together.
    assert told[first : first + 3] == ["rollouts", *LEARN]


def test_on_shared_gpus_a_run_goes_on_after_the_policy_died(parts, config, told):
    parts.demonstrations = None
    policy, update = parts.policy, parts.policy.answer
    deaths = iter([True])

    def answer(method, args):
        if method == "update" and next(deaths, False):
            raise RankGoneError("policy rank 0 died")
        return update(method, args)

    policy.answer = answer
    parts.prompts.leave_out = lambda rule: None
    parts.prompts.load_state_dict = lambda state: None
    train_to_the_end(parts, config, Stopper())
    at = told.index("restart")
    assert told[at + 1 : at + 6] == sends(0)
    assert told[-1] == "export"
    assert told.count("update") == 2

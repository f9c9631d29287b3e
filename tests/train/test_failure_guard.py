"""A run in which most trajectories fail stops, says why, and can be continued."""

import json
import math
from dataclasses import replace

import pytest

from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.rollout.metrics.failures import FailureCounts, count_failures
from mega_agentrl.train.failure_guard import FailureGuard
from mega_agentrl.train.resume.run_state import valid_checkpoints
from mega_agentrl.train.trainer import train
from mega_agentrl.types.errors import TooManyFailedError
from mega_agentrl.types.records import Role, RolloutTree, StopReason, ToolOutcome, ToolStatus
from tests.config.refusals import refused_input
from tests.fakes import FakeRubric, FakeTools, make_prompt, make_scored_tree, make_trajectory
from tests.train.metric_lines import metric_lines

pytestmark = pytest.mark.usefixtures("bare_runs")


class FailingRubric(FakeRubric):
    """Its reward cannot be computed for a share of the trajectories of training."""

    def __init__(self, fails):
        self.fails = fails

    def score(self, trajectory):
        if self.fails(trajectory):
            trajectory.reward_error = "reward function mine: returned None"
            return None
        return super().score(trajectory)


def is_training(trajectory):
    return "/train-" in trajectory.trajectory_id


def counts(num_failed, num_trajectories=10, num_aborted=0):
    return FailureCounts(
        num_trajectories=num_trajectories,
        num_failed=num_failed,
        num_aborted=num_aborted,
        first_reason="broken",
    )


def test_failures_are_counted_with_the_first_reason():
    outcome = ToolOutcome(
        tool="notes", status=ToolStatus.infra_error, answer="KeyError:\n 'a'", latency_s=0.1
    )
    tree = make_scored_tree(1.0, None)
    failed = make_trajectory(
        (2,), [(Role.tool, 1)], outcomes=[outcome], stop_reason=StopReason.tool_failure
    )
    found = count_failures(
        [tree, RolloutTree(prompt=make_prompt(), trajectories=[failed])],
    )
    assert (found.num_trajectories, found.num_failed, found.num_aborted) == (3, 2, 1)
    assert found.num_scored == 1 and found.failed_fraction == 2 / 3
    assert found.first_reason == "tool_failure: notes: KeyError: 'a'", "engine aborts come last"


def test_aborts_by_an_engine_do_not_stop_a_run():
    assert not counts(10, num_aborted=6).exceeds(0.5)
    assert counts(10, num_aborted=4).exceeds(0.5)
    assert not counts(10).exceeds(1.0)


def test_ends_that_are_scored_but_may_be_the_agents_own_fault_stop_a_run_if_most_are():
    outcome = ToolOutcome(
        tool="agent", status=ToolStatus.user_error, answer="exit\ncode 1", latency_s=0.0
    )
    crashed = make_scored_tree(
        0.0, 0.0, spans=[(Role.tool, 0)], outcomes=[outcome], stop_reason=StopReason.agent_crash
    )
    slow = make_scored_tree(0.0, stop_reason=StopReason.time_limit)
    found = count_failures([make_scored_tree(1.0, 1.0), crashed, slow])
    assert (found.num_trajectories, found.num_failed, found.num_suspect) == (5, 0, 3)
    assert found.exceeds(0.5) and not found.exceeds(0.6)
    assert found.num_scored == 5 and not found.describe()
    with pytest.raises(TooManyFailedError) as caught:
        FailureGuard(0.5).check_evaluation("before", found)
    assert (caught.value.num_failed, caught.value.num_suspect) == (0, 3)
    assert caught.value.reason == "agent_crash: agent: exit code 1"


def test_one_bad_step_is_ridden_out_and_two_in_a_row_are_not():
    guard = FailureGuard(0.5)
    for step, num_failed in enumerate([10, 5, 9, 0, 6], start=1):
        guard.check_step(step, counts(num_failed))
    with pytest.raises(TooManyFailedError) as caught:
        guard.check_step(6, counts(6))
    assert (caught.value.num_failed, caught.value.num_trajectories) == (6, 10)
    assert caught.value.bound == 0.5 and caught.value.reason == "broken"
    assert caught.value.is_training and "are not trained on" in str(caught.value)


def test_a_tool_that_always_fails_stops_the_run_at_its_first_evaluation(components, config):
    components.tools = FakeTools(fails_at="create")
    with pytest.raises(TooManyFailedError) as caught:
        train(components, config)
    assert caught.value.num_failed == caught.value.num_trajectories == 12
    assert not caught.value.is_training and "trained on" not in str(caught.value)
    assert "python" in caught.value.reason and "no disk" in caught.value.reason
    assert "update" not in components.policy.calls
    (line,) = metric_lines(components.run_dir)
    assert line["sampled/num_scored"] == 0 and "no disk" in line["rollout/first_failure"]


def test_rewards_that_fail_in_training_stop_the_run_which_then_continues(components, config):
    config = replace(config, total_steps=4, save_every_steps=1)
    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    late = {"train-2", "train-3", "train-4"}

    def fails(trajectory):
        name = trajectory.trajectory_id.split("/")[1]
        return name in late and trajectory.path != (0,)

    components.rubric = FailingRubric(fails)
    with pytest.raises(TooManyFailedError) as caught:
        train(components, config)
    assert "returned None" in caught.value.reason
    steps = [line["step"] for line in metric_lines(components.run_dir, "rl")]
    assert steps == [1, 2], "the second bad step in a row is not trained on"
    assert valid_checkpoints(components.run_dir)[0].name == "step-000002"
    components.rubric = FakeRubric()
    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    train(components, config)
    steps = [line["step"] for line in metric_lines(components.run_dir, "rl")]
    assert steps == [1, 2, 3, 4]
    epochs = [line["data/epoch"] for line in metric_lines(components.run_dir, "rl")]
    assert epochs == [0.5, 1.0, 1.5, 2.0], "three of six prompts a step, also after a resume"


class LateFailingTools(FakeTools):
    """Tools that fail once the weights have been updated."""

    generator = None

    def fail(self, step):
        self.fails_at = "calc_reward" if self.generator.version > 1 else ""
        super().fail(step)


def test_a_mended_tool_is_asked_again_after_a_resume(components, config):
    config = replace(config, save_every_steps=1)
    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    components.tools = LateFailingTools()
    components.tools.generator = components.generator
    error = refused_input(train, components, config)
    assert error.got == {"tool_failure: python: calc_reward: no disk": 12}
    assert valid_checkpoints(components.run_dir)[0].name == "step-000001"
    components.tools = FakeTools()
    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    train(components, config)
    steps = metric_lines(components.run_dir, "rl")
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["rollout/failed_fraction"] for line in steps] == [0, 0]
    assert all(line["rollout/num_groups_restored"] == 0 for line in steps)


def test_a_run_with_failures_below_the_bound_says_so_everywhere(components, config, capsys):
    components.rubric = FailingRubric(
        lambda one: (is_training(one) and one.path == (0,)) or one.prompt.prompt_id == "p0"
    )
    reward = train(components, config)
    assert math.isfinite(reward)
    summary = json.loads((components.run_dir / "summary.json").read_text())
    before = summary["failed"]["before"]
    assert (before["num_failed"], before["num_trajectories"]) == (2, 12)
    assert before["first_reason"] == "reward function mine: returned None"
    training = summary["failed"]["training"]
    assert training["fraction"] == training["num_failed"] / training["num_trajectories"] > 0
    shown = capsys.readouterr().out
    assert "10 of 12 scored │" in shown, "in the table"
    assert "samples, 10 of 12 scored)" in " ".join(shown.split())
    step_line = next(line for line in shown.splitlines() if line.startswith("RL 1/2"))
    assert "failed 0." in step_line and "returned None" in step_line


def test_a_healthy_run_shows_no_failure(components, config, capsys):
    train(components, config)
    failed = json.loads((components.run_dir / "summary.json").read_text())["failed"]
    assert [failed[when]["fraction"] for when in ("training", "before", "after")] == [0, 0, 0]
    assert failed["training"]["first_reason"] is None
    shown = capsys.readouterr().out
    assert "failed" not in shown and "scored" not in shown


def test_the_bound_of_one_never_stops(components, config):
    config.rollout.max_failed_fraction = 1.0
    components.rubric = FailingRubric(lambda one: one.path != (0,))
    train(components, config)
    assert [line["step"] for line in metric_lines(components.run_dir, "rl")] == [1, 2]

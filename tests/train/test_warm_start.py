"""When the warm start ends."""

import pytest

from mega_agentrl.config.sections.policy import SftConfig
from mega_agentrl.train import warm_start
from mega_agentrl.train.evaluate import EvalResult
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.warm_start import (
    WarmStartCheckpointing,
    WarmStartProgress,
    reached_target,
    run_warm_start,
)
from tests.train.metric_lines import metric_lines


def evaluation(success, **by_source):
    return EvalResult(
        num_questions=1,
        num_samples=1,
        reward=0.0,
        reward_se=0.0,
        success=success,
        reward_by_source={},
        success_by_source=by_source,
        metrics={},
    )


@pytest.mark.parametrize(
    ("success", "weakest", "ready"),
    [(0.3, 0.05, True), (0.29, 0.2, False), (0.6, 0.04, False)],
)
def test_ready_needs_overall_success_and_every_source(success, weakest, ready):
    sft = SftConfig(target_success_rate=0.3)
    assert reached_target(evaluation(success, easy=success, hard=weakest), sft) is ready


@pytest.fixture
def run(components, config, demonstrations, monkeypatch):
    """Run a warm start whose evaluations, two steps apart, have the given successes."""

    def run(successes, *, max_steps=100, checkpointing=None):
        config.sft = SftConfig(batch_size=2, target_success_rate=0.3, max_steps=max_steps)
        answers = iter(successes)

        def evaluate(*args, name, **kwargs):
            run.events.append(name)
            return evaluation(value := next(answers), source=value)

        monkeypatch.setattr(warm_start, "evaluate", evaluate)
        with RunLogger(components.run_dir, config) as logger:
            return run_warm_start(components, config, logger, checkpointing)

    monkeypatch.setattr(warm_start, "EVAL_EVERY_STEPS", 2)
    run.events = []
    return run


def test_the_warm_start_ends_at_the_first_check_that_reaches_the_target(run):
    result = run([0.1, 0.2, 0.4, 0.5])
    assert result.num_steps == 6 and "reached 0.3" in result.stop_reason


def test_the_warm_start_ends_at_the_limit_with_the_last_weights_in_the_engine(components, run):
    result = run([0.1, 0.1], max_steps=3)
    assert result.num_steps == 3 and "sft.max_steps=3" in result.stop_reason
    assert components.policy.calls[-3:] == ["sft_step", "sync 3", "reset_optimizer"]


def test_an_interrupted_warm_start_continues_after_its_last_step(components, run):
    batches, next_batch = [], components.make_demonstration_batches()
    components.make_demonstration_batches = lambda: (
        lambda size: batches.append(size) or next_batch(size)
    )
    # Stopped after the update of step 4, whose evaluation is still to come.
    progress = WarmStartProgress(step=4, loss=0.125, grad_norm=2.0, num_tokens=7)
    result = run([0.5], checkpointing=WarmStartCheckpointing(last_step=progress))
    assert (result.num_steps, run.events, batches) == (4, ["dev-4"], [2] * 4)
    assert components.policy.calls == ["sync 2", "reset_optimizer"]
    (line,) = metric_lines(components.run_dir)
    assert line["loss"] == 0.125


def test_each_step_is_recorded_before_its_check(run):
    record = WarmStartCheckpointing(record_step=lambda one: run.events.append(one.step))
    run([0.1, 0.5], checkpointing=record)
    assert run.events == [1, 2, "dev-2", 3, 4, "dev-4"]

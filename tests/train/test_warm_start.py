"""When the warm start ends."""

import json

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


def run(components, config, monkeypatch, successes, **sft):
    config.sft = SftConfig(batch_size=2, target_success_rate=0.3, **sft)
    monkeypatch.setattr(warm_start, "EVAL_EVERY_STEPS", 2)
    answers = iter(successes)
    monkeypatch.setattr(
        "mega_agentrl.train.warm_start.evaluate",
        lambda *args, **kwargs: evaluation(value := next(answers), source=value),
    )
    with RunLogger(components.run_dir, config) as logger:
        return run_warm_start(components, config, logger)


def test_it_ends_at_the_first_check_that_reaches_the_target(components, config, monkeypatch):
    result = run(components, config, monkeypatch, [0.1, 0.2, 0.4, 0.5], max_steps=100)
    assert result.num_steps == 6
    assert "reached 0.3" in result.stop_reason


def test_it_ends_at_the_limit_with_the_last_weights_in_the_engine(components, config, monkeypatch):
    result = run(components, config, monkeypatch, [0.1, 0.1], max_steps=3)
    assert result.num_steps == 3
    assert "sft.max_steps=3" in result.stop_reason
    sent = components.policy.calls.index("sync 3")
    assert components.policy.calls[sent - 1] == "sft_step"
    assert components.policy.calls[-1] == "reset_optimizer"


def test_it_goes_on_behind_its_last_step(components, config, monkeypatch):
    config.sft = SftConfig(batch_size=2, target_success_rate=0.3, max_steps=100)
    monkeypatch.setattr(warm_start, "EVAL_EVERY_STEPS", 2)
    asked = []
    monkeypatch.setattr(
        "mega_agentrl.train.warm_start.evaluate",
        lambda *args, **kwargs: asked.append(kwargs["name"]) or evaluation(0.5, source=0.5),
    )
    batches, next_batch = [], components.open_sft_stream()
    components.open_sft_stream = lambda: lambda size: batches.append(size) or next_batch(size)
    # Stopped after the update of step 4, whose evaluation is still to come.
    progress = WarmStartProgress(step=4, loss=0.125, grad_norm=2.0, num_tokens=7)
    with RunLogger(components.run_dir, config) as logger:
        result = run_warm_start(
            components, config, logger, WarmStartCheckpointing(last_step=progress)
        )
    assert (result.num_steps, asked, batches) == (4, ["dev-4"], [2] * 4)
    assert components.policy.calls == ["sync 2", "reset_optimizer"]
    (line,) = (components.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 0.125


def test_each_step_is_recorded_before_its_check(components, config, monkeypatch):
    config.sft = SftConfig(batch_size=2, target_success_rate=0.3, max_steps=3)
    monkeypatch.setattr(warm_start, "EVAL_EVERY_STEPS", 1)
    events, answers = [], iter([0.1, 0.1, 0.5])
    monkeypatch.setattr(
        "mega_agentrl.train.warm_start.evaluate",
        lambda *args, **kwargs: (
            events.append(kwargs["name"]) or evaluation(value := next(answers), source=value)
        ),
    )
    checkpointing = WarmStartCheckpointing(record_step=lambda one: events.append(one.step))
    with RunLogger(components.run_dir, config) as logger:
        run_warm_start(components, config, logger, checkpointing)
    assert events == [1, "dev-1", 2, "dev-2", 3, "dev-3"]

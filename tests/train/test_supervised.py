"""When the warm start ends."""

import json

import pytest

from mega_agentrl.config.schema import SftConfig
from mega_agentrl.train import supervised
from mega_agentrl.train.evaluate import Evaluation
from mega_agentrl.train.session import Session
from mega_agentrl.train.supervised import Imitated, Keeping, is_ready, warm_start


def evaluation(success, **by_source):
    return Evaluation(
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
    sft = SftConfig(target_success=0.3)
    assert is_ready(evaluation(success, easy=success, hard=weakest), sft) is ready


def run(parts, config, monkeypatch, successes, **sft):
    config.sft = SftConfig(batch_size=2, target_success=0.3, **sft)
    monkeypatch.setattr(supervised, "CHECK_EVERY", 2)
    answers = iter(successes)
    monkeypatch.setattr(
        "mega_agentrl.train.supervised.evaluate",
        lambda *args, **kwargs: evaluation(value := next(answers), source=value),
    )
    with Session(parts.run_dir, config) as session:
        return warm_start(parts, config, session)


def test_it_ends_after_two_good_checks_in_a_row(parts, config, monkeypatch):
    result = run(parts, config, monkeypatch, [0.4, 0.2, 0.4, 0.5], max_steps=100)
    assert result.num_steps == 8
    assert "twice in a row" in result.reason


def test_it_ends_at_the_limit_with_the_last_weights_in_the_engine(parts, config, monkeypatch):
    result = run(parts, config, monkeypatch, [0.1, 0.1], max_steps=3)
    assert result.num_steps == 3
    assert "sft.max_steps=3" in result.reason
    supervised = parts.policy.verbs.index("send 3")
    assert parts.policy.verbs[supervised - 1] == "supervise"
    assert parts.policy.verbs[-1] == "reset"


def test_it_goes_on_behind_its_last_step(parts, config, monkeypatch):
    config.sft = SftConfig(batch_size=2, target_success=0.3, max_steps=100)
    monkeypatch.setattr(supervised, "CHECK_EVERY", 2)
    asked = []
    monkeypatch.setattr(
        "mega_agentrl.train.supervised.evaluate",
        lambda *args, **kwargs: asked.append(kwargs["name"]) or evaluation(0.5, source=0.5),
    )
    batches, demonstrations = [], parts.demonstrations()
    parts.demonstrations = lambda: lambda size: batches.append(size) or demonstrations(size)
    # Stopped behind step 4, after one good check, with the second one still to come.
    done = Imitated(step=4, num_ready=1, loss=0.125, grad_norm=2.0, num_tokens=7)
    with Session(parts.run_dir, config) as session:
        result = warm_start(parts, config, session, Keeping(done=done))
    assert (result.num_steps, asked, batches) == (4, ["dev-4"], [2] * 4)
    assert parts.policy.verbs == ["send 2", "reset"]
    (line,) = (parts.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 0.125


def test_each_step_is_noted_with_the_checks_before_it(parts, config, monkeypatch):
    config.sft = SftConfig(batch_size=2, target_success=0.3, max_steps=3)
    monkeypatch.setattr(supervised, "CHECK_EVERY", 1)
    answers = iter([0.5, 0.1, 0.5])
    monkeypatch.setattr(
        "mega_agentrl.train.supervised.evaluate",
        lambda *args, **kwargs: evaluation(value := next(answers), source=value),
    )
    noted = []
    with Session(parts.run_dir, config) as session:
        warm_start(parts, config, session, Keeping(note=noted.append))
    assert [(one.step, one.num_ready) for one in noted] == [(1, 0), (2, 1), (3, 0)]

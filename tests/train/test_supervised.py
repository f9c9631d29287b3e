"""When the warm start ends."""

import pytest

from mega_agentrl.config.schema import SftConfig
from mega_agentrl.train.evaluate import Evaluation
from mega_agentrl.train.session import Session
from mega_agentrl.train.supervised import is_ready, warm_start


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
    config.sft = SftConfig(check_every=2, batch_size=2, target_success=0.3, **sft)
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

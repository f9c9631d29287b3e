"""The critic's part of a step: who is updated when, and what is shown of it."""

from dataclasses import replace

import pytest
import torch

from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.choices import Advantage
from mega_agentrl.config.policy_schema import OptimConfig
from mega_agentrl.train.steering import Lesson
from mega_agentrl.train.values import add_values, left_alone, update_models
from mega_agentrl.types.batch import UpdateStats
from tests.train.test_advantages import batch


class Critic:
    """Knows one value for everything."""

    def add_values(self, given):
        return given.with_fields(value_BT=torch.full((4, 2), 0.5))

    def update(self, given):
        assert given.return_BT is not None
        metrics = {"value_loss": 0.1, "value_clipfrac": 0.2, "value": 0.3, "return": 0.4}
        return UpdateStats(
            loss=0.1,
            grad_norm=0.6,
            learning_rate=0.1,
            num_tokens=7,
            num_skipped=1,
            metrics=metrics | {"explained_variance": -0.5},
        )


@pytest.fixture
def lesson():
    given = batch(return_BT=torch.zeros(4, 2), advantage_BT=torch.zeros(4, 2))
    return Lesson(batch=given, kl_weight_BT=None, ares=None)


def test_without_a_critic_it_is_the_policys_update(parts, config, lesson):
    stats, metrics = update_models(parts, config, lesson, 1)
    assert (stats.num_tokens, metrics) == (7, {})
    given = batch()
    assert add_values(parts, given) is given


def test_the_critic_is_updated_first_and_alone_in_its_warm_up(parts, config, lesson):
    parts.critic = Critic()
    assert add_values(parts, batch()).value_BT.unique().tolist() == [0.5]
    config = replace(
        config,
        algo=AlgoConfig(advantage=Advantage.gae),
        optim=OptimConfig(critic_warmup_steps=2, num_minibatches=3),
    )
    for step in (1, 2):
        stats, metrics = update_models(parts, config, lesson, step)
        assert stats == left_alone(config) and stats.num_skipped == 3
        assert parts.policy.verbs == []
        assert metrics["value/warmup"] == 1.0
    stats, metrics = update_models(parts, config, lesson, 3)
    assert parts.policy.verbs == ["update"] and stats.num_tokens == 7
    assert metrics == {
        "value/loss": 0.1,
        "value/explained_variance": -0.5,
        "value/clipped": 0.2,
        "value/mean": 0.3,
        "value/return": 0.4,
        "value/grad_norm": 0.6,
        "value/num_skipped": 1.0,
        "value/warmup": 0.0,
    }

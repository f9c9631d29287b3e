"""The critic's part of a step: who is updated when, and what is shown of it."""

from dataclasses import replace

import pytest
import torch

from mega_agentrl.config.enums import AdvantageEstimator
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import OptimConfig
from mega_agentrl.train.critic_steps import add_values, skipped_update_stats, update_models
from mega_agentrl.train.train_inputs import TrainInputs
from mega_agentrl.types.batch import UpdateStats
from tests.train.test_advantages import batch


class Critic:
    """Knows one value for everything."""

    def compute_values(self, given):
        return given.with_fields(value_BT=torch.full((4, 2), 0.5))

    def update(self, given):
        assert given.return_BT is not None
        metrics = {"value_loss": 0.1, "value_clipfrac": 0.2, "value": 0.3, "return": 0.4}
        return UpdateStats(
            loss=0.1,
            grad_norm=0.6,
            learning_rate=0.1,
            num_tokens=7,
            num_skipped_steps=1,
            metrics=metrics | {"explained_variance": -0.5},
        )


@pytest.fixture
def train_inputs():
    given = batch(return_BT=torch.zeros(4, 2), advantage_BT=torch.zeros(4, 2))
    return TrainInputs(batch=given, kl_weight_BT=None, ares_step=None)


def test_without_a_critic_it_is_the_policys_update(components, config, train_inputs):
    stats, metrics = update_models(components, config, train_inputs, 1)
    assert (stats.num_tokens, metrics) == (7, {})
    given = batch()
    assert add_values(components, given) is given


def test_the_critic_is_updated_first_and_alone_in_its_warm_up(components, config, train_inputs):
    components.critic = Critic()
    assert add_values(components, batch()).value_BT.unique().tolist() == [0.5]
    config = replace(
        config,
        algo=AlgoConfig(advantage=AdvantageEstimator.gae),
        optim=OptimConfig(critic_warmup_steps=2, num_minibatches=3),
    )
    for step in (1, 2):
        stats, metrics = update_models(components, config, train_inputs, step)
        assert stats == skipped_update_stats(config) and stats.num_skipped_steps == 3
        assert components.policy.calls == []
        assert metrics["critic/is_warmup"] == 1.0
    stats, metrics = update_models(components, config, train_inputs, 3)
    assert components.policy.calls == ["update"] and stats.num_tokens == 7
    assert metrics == {
        "critic/loss": 0.1,
        "critic/explained_variance": -0.5,
        "critic/clipfrac": 0.2,
        "critic/value_mean": 0.3,
        "critic/return_mean": 0.4,
        "critic/grad_norm": 0.6,
        "critic/num_skipped_steps": 1.0,
        "critic/is_warmup": 0.0,
    }

"""Policy and critic in a step: who is updated when, what is shown of it, and what is profiled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import OptimConfig
from mega_agentrl.train import trainer
from mega_agentrl.train.algorithm import TrainInputs
from mega_agentrl.train.model_updater import ModelUpdater
from mega_agentrl.train.output import metric_writer
from mega_agentrl.train.trainer import train
from mega_agentrl.types.batch import UpdateStats
from tests.rollout.grown_trees import nested_tree
from tests.train.metric_lines import metric_lines
from tests.train.test_advantages import batch


class Critic:
    """Knows one value for everything."""

    def compute_values(self, given):
        return given.with_fields(value_BT=torch.full(given.mask_BT.shape, 0.5))

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


def test_without_a_critic_only_the_policy_is_updated(components, config, train_inputs):
    policy = ModelUpdater(components, config)
    stats, metrics = policy.update(train_inputs, 1)
    assert (stats.num_tokens, metrics) == (7, {})
    scored = policy.compute_log_probs(pack_trees([nested_tree()]))
    assert scored.old_logp_BT is not None and scored.value_BT is None


def test_the_critic_is_updated_first_and_alone_in_its_warm_up(components, config, train_inputs):
    components.critic = Critic()
    config = replace(
        config,
        algo=AlgoConfig(advantage="gae"),
        optim=OptimConfig(critic_warmup_steps=2, num_minibatches=3),
    )
    policy = ModelUpdater(components, config)
    assert policy.compute_log_probs(pack_trees([nested_tree()])).value_BT.unique().tolist() == [0.5]
    components.policy.calls.clear()
    for step in (1, 2):
        stats, metrics = policy.update(train_inputs, step)
        assert (stats.num_tokens, stats.num_skipped_steps, stats.metrics) == (0, 3, {})
        assert components.policy.calls == []
        assert metrics["critic/is_warmup"] == 1.0
    stats, metrics = policy.update(train_inputs, 3)
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


def test_only_chosen_steps_are_traced(components, config):
    train(components, replace(config, report=replace(config.report, profile_steps=[2, 9])))
    assert components.policy.calls == [
        "sync 1",
        "compute_log_probs",
        "update",
        "sync 2",
        "start profile",
        "compute_log_probs",
        "update",
        "stop profile step-2-rank0.json",
        "sync 3",
        "save step-000002",
        "export_hf",
    ]


@pytest.mark.usefixtures("bare_runs")
def test_packing_counts_as_part_of_the_rollout(components, config, tmp_path, monkeypatch):
    now_s = [0.0]

    def pack_in_five_seconds(trees):
        now_s[0] += 5.0
        return pack_trees(trees)

    monkeypatch.setattr(metric_writer, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(trainer, "pack_trees", pack_in_five_seconds)
    train(components, config)
    steps = metric_lines(tmp_path, "rl")
    assert [(one["time/rollout_s"], one["time/logprob_s"]) for one in steps] == [(5.0, 0.0)] * 2

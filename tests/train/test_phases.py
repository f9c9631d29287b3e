"""Advantages by name and the mismatch metrics, on numbers worked by hand."""

import pytest
import torch

from mega_agentrl.config.choices import Advantage
from mega_agentrl.config.schema import AlgoConfig
from mega_agentrl.train.phases import add_advantages, collect_trees, mismatch_metrics
from mega_agentrl.types.batch import TrainBatch


def batch(**changes):
    """Two groups of two; row 1 holds row 0's first token, row 3 is half masked."""
    zeros_BT = torch.zeros(4, 2)
    values = {
        "prompt_ids": ((1,),) * 4,
        "response_BT": torch.ones(4, 2, dtype=torch.int64),
        "length_B": torch.full((4,), 2),
        "mask_BT": torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool(),
        "group_B": torch.tensor([0, 0, 1, 1]),
        "reward_B": torch.tensor([1.0, 0.0, 3.0, 1.0]),
        "node_BT": torch.tensor([[0, 1], [0, 2], [3, 4], [5, 6]]),
        "rollout_logp_BT": zeros_BT,
        "rollout_entropy_BT": zeros_BT,
        "version_BT": torch.zeros(4, 2, dtype=torch.int64),
    }
    return TrainBatch(**(values | changes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (Advantage.grpo, [[0.5, 0.5], [-0.5, -0.5], [1, 1], [-1, 0]]),
        (Advantage.rloo, [[1, 1], [-1, -1], [2, 2], [-2, 0]]),
        (Advantage.arpo_hard, [[0, 0.5], [0, -0.5], [1, 1], [-1, 0]]),
    ],
)
def test_advantages_by_hand(name, expected):
    algo = AlgoConfig(advantage=name, norm_by_std=False)
    assert add_advantages(batch(), algo).advantage_BT.tolist() == expected


def test_every_estimator_of_the_schema_is_wired():
    for name in Advantage:
        assert add_advantages(batch(), AlgoConfig(advantage=name)).advantage_BT is not None


def test_mismatch_reads_trained_tokens_only():
    old_BT = torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.1, 0.1], [0.8, 99.0]])
    entropy_BT = torch.tensor([[0.7, 0], [0, 0], [0, 0], [0, 99.0]])
    metrics = mismatch_metrics(batch(old_logp_BT=old_BT, entropy_BT=entropy_BT))
    assert metrics["mismatch/logp_mean_abs"] == pytest.approx((6 * 0.1 + 0.8) / 7)
    assert metrics["mismatch/logp_max_abs"] == pytest.approx(0.8)
    assert metrics["mismatch/entropy_mean_abs"] == pytest.approx(0.1)
    assert metrics["mismatch/entropy_max_abs"] == pytest.approx(0.7)


def test_collect_gives_a_full_group_per_prompt_and_differs_by_step(parts, config):
    prompts = parts.prompts.next(3)
    trees = collect_trees(parts, config, prompts, 1)
    assert [tree.prompt for tree in trees] == prompts
    assert all(len(tree.trajectories) == 4 for tree in trees)
    texts = [[t.response_text for t in tree.trajectories] for tree in trees]
    again = collect_trees(parts, config, prompts, 1)
    assert texts == [[t.response_text for t in tree.trajectories] for tree in again]
    other = collect_trees(parts, config, prompts, 2)
    assert texts != [[t.response_text for t in tree.trajectories] for tree in other]

"""Advantages by name and the mismatch metrics, on numbers worked by hand."""

import asyncio
import json

import pytest
import torch

from mega_agentrl.config.choices import Advantage, FilterKey
from mega_agentrl.config.schema import AlgoConfig
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.train.loop import train
from mega_agentrl.train.phases import (
    add_advantages,
    collect_groups,
    mismatch_metrics,
    open_groups,
)
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


@pytest.mark.parametrize("name", Advantage)
def test_rows_of_one_trajectory_share_its_advantage_and_count_once(name):
    algo = AlgoConfig(advantage=name)
    plain, rows = batch(), [0, 1, 1, 2, 2, 2, 3]
    owners = torch.tensor([7, 3, 3, 5, 5, 5, 6])
    # Rows of one trajectory hold different tokens.
    node_BT = torch.where(plain.node_BT == 0, 0, 10 + torch.arange(4).unsqueeze(1))
    plain = plain.with_fields(node_BT=node_BT)
    expected_BT = add_advantages(plain, algo).advantage_BT[rows]
    several = plain.select(rows).with_fields(owner_B=owners)
    if name is Advantage.arpo_hard:
        # A shared token weighs as often as there are rows that hold it: give each row its own.
        own_BT = torch.arange(14).view(7, 2)
        expected_BT = add_advantages(plain.with_fields(node_BT=own_BT[:4]), algo).advantage_BT[rows]
        several = several.with_fields(node_BT=own_BT)
    assert torch.equal(add_advantages(several, algo).advantage_BT, expected_BT)


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
    def texts(step):
        parts.prompts.at = 0
        with open_groups(parts, config) as groups:
            trees = collect_groups(parts, groups, step).trees
        assert [tree.prompt for tree in trees] == parts.prompts.prompts[:3]
        assert all(len(tree.trajectories) == 4 for tree in trees)
        return [[one.response_text for one in tree.trajectories] for tree in trees]

    assert texts(1) == texts(1) != texts(2)


def test_what_is_carried_over_ends_with_the_run_and_its_prompts_go_back(parts, config):
    async def num_tasks():
        return len(asyncio.all_tasks())

    parts.prompts = PromptSampler(parts.validation, seed=1)
    config.rollout.carry_over, config.rollout.oversample = True, 2
    with pytest.raises(KeyError, match="a bug"), open_groups(parts, config) as groups:
        collected = collect_groups(parts, groups, 1)
        assert len(collected.trees) == 3 and collected.counts["carried_over"] == 2
        assert len(parts.prompts.state_dict()["out"]) == 2
        raise KeyError("a bug")
    assert parts.wait(num_tasks()) == 1
    assert all(session.released == 1 for session in parts.tools.sessions)
    state = parts.prompts.state_dict()
    assert not state["out"] and len(state["returned"]) == 2


def test_a_step_trains_on_groups_that_differ_and_reports_all(parts, config, tmp_path):
    parts.demonstrations, parts.prompts = None, PromptSampler(parts.validation, seed=1)
    config.rollout.filter_key = FilterKey.reward
    config.rollout.filter_range = [0.4, 0.6]
    train(parts, config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    for line in steps:
        assert line["rollout/groups_kept"] == 3
        assert 0.4 < line["rollout/reward_mean"] < 0.6
        num_filtered = line["rollout/groups_filtered_low"] + line["rollout/groups_filtered_high"]
        assert line["rollout/groups_started"] == 3 + num_filtered
        same = line["rollout/reward_seen"] == line["rollout/reward_mean"]
        assert same == (num_filtered == 0)
    assert sum(line["rollout/groups_started"] for line in steps) > 6, "nothing was filtered"

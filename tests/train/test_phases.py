"""Collecting the groups of a step, and what is carried over."""

import asyncio
import json

import pytest

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.train.loop import train
from mega_agentrl.train.phases import collect_groups, open_groups


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

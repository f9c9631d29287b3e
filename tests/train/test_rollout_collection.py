"""Collecting the groups of a step, and what is carried over."""

import asyncio
import json

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.train.rollout_collection import collect_rollouts, open_rollout_collector
from mega_agentrl.train.trainer import train


def test_collect_gives_a_full_group_per_prompt_and_differs_by_step(components, config):
    def texts(step):
        components.prompt_source.at = 0
        with open_rollout_collector(components, config) as collector:
            trees = collect_rollouts(components, collector, step).trees
        assert [tree.prompt for tree in trees] == components.prompt_source.prompts[:3]
        assert all(len(tree.trajectories) == 4 for tree in trees)
        return [[one.response_text for one in tree.trajectories] for tree in trees]

    assert texts(1) == texts(1) != texts(2)


def test_what_is_carried_over_ends_with_the_run_and_its_prompts_go_back(components, config):
    async def num_tasks():
        return len(asyncio.all_tasks())

    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    config.rollout.partial_rollout, config.rollout.num_oversampled_prompts = True, 2
    with (
        pytest.raises(KeyError, match="a bug"),
        open_rollout_collector(components, config) as collector,
    ):
        rollout_batch = collect_rollouts(components, collector, 1)
        assert (
            len(rollout_batch.trees) == 3
            and rollout_batch.group_counts["num_groups_carried_over"] == 2
        )
        assert len(components.prompt_source.state_dict()["in_flight"]) == 2
        raise KeyError("a bug")
    assert components.run_coroutine(num_tasks()) == 1
    assert all(session.released == 1 for session in components.tools.sessions)
    state = components.prompt_source.state_dict()
    assert not state["in_flight"] and len(state["requeued"]) == 2


def test_a_step_trains_on_groups_that_differ_and_reports_all(components, config, tmp_path):
    components.open_sft_stream, components.prompt_source = (
        None,
        PromptSampler(components.validation_prompts, seed=1),
    )
    config.rollout.filter_metric = FilterMetric.reward
    config.rollout.filter_range = [0.4, 0.6]
    train(components, config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    for line in steps:
        assert line["rollout/num_groups_kept"] == 3
        assert 0.4 < line["rollout/reward_mean"] < 0.6
        num_filtered = (
            line["rollout/num_groups_filtered_low"] + line["rollout/num_groups_filtered_high"]
        )
        assert line["rollout/num_groups_started"] == 3 + num_filtered
        same = line["rollout/reward_unfiltered"] == line["rollout/reward_mean"]
        assert same == (num_filtered == 0)
    assert sum(line["rollout/num_groups_started"] for line in steps) > 6, "nothing was filtered"

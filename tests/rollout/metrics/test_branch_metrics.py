"""Branching metrics, by hand and against the nodes of the tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.config.sections.branching import BranchConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.io.nodes import to_node_tree
from mega_agentrl.rollout.metrics.branch import branch_metrics
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt
from tests.rollout.grown_trees import grown, nested_tree


def test_the_nested_tree_by_hand():
    tree = nested_tree()
    first, second = (28 + 22, 28 + 22 + 29 + 22)
    # 0 is whole; 0.0 takes over the first turn, 0.0.0 and 0.1 the first two, 28 and 29 sampled.
    assert [one.fork_len for one in tree.trajectories] == [0, first, second, second]
    held = sum(sum(one.loss_mask) for one in tree.trajectories)
    assert branch_metrics([tree]) == pytest.approx(
        {
            "forks_per_prompt": 3,
            "top_ups_per_prompt": 0,
            "decisions_per_prompt": 3,
            "fork_rate": 1,
            "delta_h": 1,
            "tokens_saved_fraction": (28 + 57 + 57) / held,
            "calls_saved_fraction": (1 + 2 + 2) / 8,
        }
    )


def test_decisions_that_did_not_fork_count_too():
    got = branch_metrics([nested_tree(), nested_tree(after=0.5)])
    assert got["decisions_per_prompt"] == 2.5 and got["fork_rate"] == 0.6
    assert got["delta_h"] == pytest.approx((3 * 1.0 - 2 * 0.5) / 5)
    assert got["forks_per_prompt"] == 1.5 and got["top_ups_per_prompt"] == 1.5


@settings(max_examples=40)
@given(grown())
def test_saved_is_what_the_nodes_hold_only_once(tree):
    nodes = to_node_tree(tree)
    held = sum(sum(one.loss_mask) for one in tree.trajectories)
    sampled = sum(sum(node.loss_mask) for node in nodes.nodes)
    got = branch_metrics([tree])["tokens_saved_fraction"]
    assert got == pytest.approx(1 - sampled / held if held else 0)
    assert (got > 0) == (tree.num_forks > 0)


async def test_the_estimates_distance_is_there_when_asked_for():
    gaps = []
    for top_k in (0, 1):
        config = RolloutConfig(group_size=4, branch=BranchConfig(entropy_estimate_top_k=top_k))
        (tree,) = await collect_rollouts(
            [make_prompt()],
            generator=FakeGenerator(),
            tools=FakeTools(),
            codec=CharCodec(),
            rubric=FakeRubric(),
            config=config,
            max_model_len=200,
            seed=1,
            step=1,
        )
        gaps.append(branch_metrics([tree]).get("topk_entropy_gap"))
    assert gaps[0] is None
    assert gaps[1] > 0


def test_without_decisions_there_is_no_mean_of_them():
    assert "delta_h" not in branch_metrics([])
    assert set(branch_metrics([]).values()) == {0.0}

"""Entropy by token offset, by hand; every token counts once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.rollout.metrics.entropy import (
    NUM_OFFSETS,
    EntropyByOffset,
    EntropyCurves,
    collect_entropy_curves,
    entropy_metrics,
)
from mega_agentrl.types.records import Role, RolloutTree
from tests.fakes import make_trajectory
from tests.rollout.grown_trees import grown, nested_tree, part
from tests.through_json import through_json


def test_the_nested_tree_has_a_curve_of_the_root_and_one_after_tools():
    # First turn "thinkhard<search>q1</search>", 28 tokens at 1 nat. Behind answers, at 2 nats:
    # six turns, three of them "more words<search>..." (29) and three "more words<answer>..." (29).
    curve = collect_entropy_curves(nested_tree().trajectories)
    assert curve.root.counts == (1,) * 28 + (0,) * (NUM_OFFSETS - 28)
    assert set(curve.root.sums[:28]) == {1.0}
    assert curve.after_tool.counts[0] == 6
    assert curve.after_tool.mean() == 2.0
    metrics = entropy_metrics(nested_tree().trajectories)
    assert metrics["entropy_root"] == 1.0 and metrics["entropy_after_tool"] == 2.0
    for start in (0, 5, 10, 20):
        assert metrics[f"entropy_root/{start}"] == 1.0
        assert metrics[f"entropy_after_tool/{start}"] == 2.0
    assert "entropy_root/35" not in metrics, "no first turn is that long"


def test_offsets_count_sampled_tokens_only():
    one = nested_tree().trajectories[0]
    one.entropies[:4] = [9.0, 5.0, 7.0, 3.0]
    one.loss_mask[1] = 0
    curve = collect_entropy_curves([one])
    assert curve.root.sums[:3] == (9.0, 7.0, 3.0)
    assert curve.root.counts[:28] == (1,) * 27 + (0,)


def test_the_mean_over_a_turn_begins_with_its_first_token():
    one = nested_tree().trajectories[0]
    answered = [turn for turn in one.turns if turn.role is Role.assistant][1]
    for start in (0, answered.start):
        one.entropies[start] = 1000.0
    metrics = entropy_metrics([one])
    assert metrics["entropy_root"] > 20
    assert metrics["entropy_after_tool"] > 20


def test_a_path_that_leaves_a_turn_inside_counts_at_its_offset():
    root = make_trajectory((0,), [(Role.assistant, 4)], entropies=[1.0] * 4)
    tree = RolloutTree(prompt=root.prompt, trajectories=[root])
    curve = collect_entropy_curves(part(tree, root, root.turns[0], 2, num_new=3).trajectories)
    assert curve.root.counts[:6] == (1, 1, 2, 2, 1, 0)
    assert curve.root.sums[:6] == (1.0, 1.0, 1.125, 1.125, 0.125, 0.0)


@settings(max_examples=40)
@given(grown())
def test_every_sampled_token_counts_once(tree):
    curve = collect_entropy_curves(tree.trajectories)
    num_first = num_behind = 0
    for one in tree.trajectories:
        for turn in one.turns:
            own = turn.role is Role.assistant and turn.start >= one.fork_len
            size = min(turn.stop - turn.start, NUM_OFFSETS) * own
            num_first += size * (turn.index == 0)
            num_behind += size * (turn.index > 0)
    assert sum(curve.root.counts) == num_first
    assert sum(curve.after_tool.counts) == num_behind


def test_curves_add_up_and_a_mean_of_nothing_is_none():
    once = collect_entropy_curves(nested_tree().trajectories)
    twice = once + once
    assert twice.root.counts[0] == 2 * once.root.counts[0]
    assert twice.root.mean() == once.root.mean()
    assert EntropyCurves() + once == once
    assert EntropyByOffset().mean() is None and EntropyByOffset().bucket_means() == {}
    record = twice.to_summary()
    assert record["root"][:29] == [1.0] * 28 + [None]
    assert record["num_after_tool"][0] == 12


@given(st.lists(st.floats(0, 5), min_size=NUM_OFFSETS, max_size=NUM_OFFSETS))
def test_buckets_cover_every_offset(sums):
    means = EntropyByOffset(sums=tuple(sums), counts=(1,) * NUM_OFFSETS)
    widths = {0: 5, 5: 5, 10: 10, 20: 15, 35: 16}
    assert means.bucket_means().keys() == widths.keys()
    total = sum(means.bucket_means()[start] * width for start, width in widths.items())
    assert total == pytest.approx(sum(sums))


def test_json_restores_the_curves():
    curve = EntropyCurves(
        root=EntropyByOffset(sums=(1 / 3,) * NUM_OFFSETS, counts=(2,) * NUM_OFFSETS)
    )
    assert through_json(curve) == curve

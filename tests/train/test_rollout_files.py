"""`train.rollout_files`: which steps are kept, and under which names."""

from __future__ import annotations

import pytest

from mega_agentrl.batch.pack import pack
from mega_agentrl.config.schema import ReportConfig, TrainConfig
from mega_agentrl.rollout.nodes import to_tree
from mega_agentrl.rollout.tree_file import read_trees
from mega_agentrl.train.advantage_file import read_advantages
from mega_agentrl.train.rollout_files import RolloutFiles
from tests.rollout.grown_trees import nested_tree


def _files(folder, every, last=7):
    config = TrainConfig(total_steps=last, report=ReportConfig(trees_every=every))
    return RolloutFiles(folder, config)


@pytest.mark.parametrize(
    ("every", "chosen"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (10, [7])]
)
def test_every_so_many_steps_and_the_last(tmp_path, every, chosen):
    files = _files(tmp_path, every)
    assert [step for step in range(1, 8) if files.chosen(step)] == chosen


def test_what_is_kept_is_read_back(tmp_path):
    files, tree = _files(tmp_path, 2), nested_tree()
    batch = pack([tree, tree])
    advantage_BT = batch.mask_BT * batch.reward_B.unsqueeze(1)
    files.keep_step(2, [tree, tree], batch.with_fields(advantage_BT=advantage_BT))
    files.keep_held_out("before", "_greedy", 0, [tree])
    files.keep_held_out("during", "", 20, [tree])
    assert [to_tree(one.tree) for one in read_trees(tmp_path / "rollouts/step_000002.jsonl")] == [
        tree,
        tree,
    ]
    kept = read_advantages(tmp_path / "rollouts/step_000002.jsonl")
    rewards = {one.trajectory_id: one.score.value for one in tree.trajectories if not one.failed}
    assert kept == pytest.approx(rewards)
    (one,) = read_trees(tmp_path / "rollouts/held_out_before_greedy.jsonl")
    assert (one.stage, one.step) == ("held_out_before_greedy", 0)
    (one,) = read_trees(tmp_path / "rollouts/held_out_step_000020.jsonl")
    assert (one.stage, one.step) == ("held_out_during", 20)


def test_without_steps_to_keep_no_evaluation_is_kept(tmp_path):
    _files(tmp_path, 0).keep_held_out("before", "", 0, [nested_tree()])
    assert not list(tmp_path.iterdir())

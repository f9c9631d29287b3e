"""`train.output.rollout_files`: which steps are saved, and under which names."""

from __future__ import annotations

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.schema import ReportConfig, TrainConfig
from mega_agentrl.rollout.io.nodes import to_rollout_tree
from mega_agentrl.rollout.io.tree_file import read_trees
from mega_agentrl.train.output.advantage_file import read_advantages
from mega_agentrl.train.output.rollout_files import RolloutWriter
from tests.rollout.grown_trees import nested_tree


def _files(folder, every, last=7):
    config = TrainConfig(total_steps=last, report=ReportConfig(save_trees_every_steps=every))
    return RolloutWriter(folder, config)


@pytest.mark.parametrize(
    ("every", "chosen"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (10, [7])]
)
def test_every_so_many_steps_and_the_last(tmp_path, every, chosen):
    files = _files(tmp_path, every)
    assert [step for step in range(1, 8) if files.should_save(step)] == chosen


def test_saved_trees_are_read_back(tmp_path):
    files, tree = _files(tmp_path, 2), nested_tree()
    batch = pack_trees([tree, tree])
    advantage_BT = batch.mask_BT * batch.reward_B.unsqueeze(1)
    files.save_step(2, [tree, tree], batch.with_fields(advantage_BT=advantage_BT))
    files.save_validation("before", "_greedy", 0, [tree])
    files.save_validation("during", "", 20, [tree])
    assert [
        to_rollout_tree(one.tree) for one in read_trees(tmp_path / "rollouts/step_000002.jsonl")
    ] == [
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


def test_without_saved_steps_no_validation_is_saved(tmp_path):
    _files(tmp_path, 0).save_validation("before", "", 0, [nested_tree()])
    assert not list(tmp_path.iterdir())

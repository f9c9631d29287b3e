"""Which steps are saved, under which names, with the advantages by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.runtime import ReportConfig
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.io.nodes import to_rollout_tree
from mega_agentrl.rollout.io.tree_file import read_trees
from mega_agentrl.train.output.rollout_files import (
    RolloutWriter,
    mean_advantages,
    read_advantages,
    write_advantages,
)
from mega_agentrl.types.records import StopReason
from tests.rollout.grown_trees import nested_tree


def _files(folder, every, last=7):
    config = TrainConfig(total_steps=last, report=ReportConfig(save_trees_every_steps=every))
    return RolloutWriter(folder, config)


@pytest.mark.parametrize(
    ("every", "chosen"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (10, [7])]
)
def test_trees_are_saved_at_the_interval_and_at_the_last_step(tmp_path, every, chosen):
    files = _files(tmp_path, every)
    assert [step for step in range(1, 8) if files.should_save(step)] == chosen


def test_saved_trees_are_read_back(tmp_path, tree):
    files = _files(tmp_path, 2)
    batch = pack_trees([tree, tree])
    advantage_BT = batch.mask_BT * batch.reward_B.unsqueeze(1)
    files.save_step(2, [tree, tree], batch.with_fields(advantage_BT=advantage_BT))
    files.save_validation("before", "_greedy", 0, [tree])
    files.save_validation("during", "", 20, [tree])
    stored = read_trees(tmp_path / "rollouts/step_000002.jsonl")
    assert [to_rollout_tree(one.tree) for one in stored] == [tree, tree]
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


@pytest.fixture
def tree():
    return nested_tree()


def packed(tree, advantage):
    """The batch with `advantage(row)` on every position, padding and tool tokens included."""
    batch = pack_trees([tree])
    rows_B = torch.tensor([advantage(row) for row in range(batch.num_rows)])
    return batch.with_fields(advantage_BT=rows_B[:, None].expand(batch.mask_BT.shape).float())


def test_the_mean_over_trained_tokens(tree):
    batch = packed(tree, float)
    names = [one.trajectory_id for one in tree.trajectories]
    assert mean_advantages([tree], batch) == dict(zip(names, [0.0, 1.0, 2.0, 3.0], strict=True))
    advantage_BT = torch.where(batch.mask_BT, batch.advantage_BT, torch.tensor(math.nan))
    advantage_BT[1, 0] = 1.0 + int(batch.mask_BT[1].sum())
    batch = batch.with_fields(advantage_BT=advantage_BT)
    assert mean_advantages([tree], batch)[names[1]] == pytest.approx(2.0)


def test_a_trajectory_that_is_not_trained_on_is_left_out(tree):
    tree.trajectories[2].stop_reason = StopReason.aborted
    assert len(mean_advantages([tree], packed(tree, float))) == 3


def test_rows_of_one_trajectory_count_together(tree):
    batch = packed(tree, float).with_fields(trajectory_B=torch.tensor([0, 0, 1, 2]))
    means = list(mean_advantages([tree], batch).values())
    counts = batch.mask_BT.sum(dim=1).tolist()
    assert means == pytest.approx([counts[1] / (counts[0] + counts[1]), 2.0, 3.0])


def test_a_batch_of_other_trees_is_refused(tree):
    with pytest.raises(InputError) as caught:
        mean_advantages([tree], pack_trees([tree]))
    assert caught.value.got is None
    with pytest.raises(InputError) as caught:
        mean_advantages([], packed(tree, float))
    assert "4 trajectories" in caught.value.got
    assert "0 trajectories" in caught.value.expected


def test_advantages_are_written_beside_the_trees_and_read_back(tmp_path):
    trees_file = tmp_path / "rollouts/step_000001.jsonl"
    assert read_advantages(trees_file) == {}
    write_advantages(trees_file, {"a": 0.5, "b": -1.0})
    assert read_advantages(trees_file) == {"a": 0.5, "b": -1.0}
    assert [path.name for path in trees_file.parent.iterdir()] == ["step_000001.advantages.json"]


@pytest.mark.parametrize("text", ["[1]", '{"a": "x"}', '{"a": null}', "{"])
def test_a_malformed_advantages_file_is_refused(tmp_path, text):
    (tmp_path / "x.advantages.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_advantages(tmp_path / "x.jsonl")
    assert caught.value.name == str(tmp_path / "x.advantages.json")

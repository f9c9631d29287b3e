"""A checkpoint of one or two models, from its start to its commit, and what a failure leaves."""

from __future__ import annotations

import pytest

from mega_agentrl.actor.checkpoint.checkpoint_dir import latest_checkpoint
from mega_agentrl.train.resume.pending_checkpoint import ModelSave, PendingCheckpoint
from tests.train.file_policy import FilePolicy


class Writing(FilePolicy):
    """Answers a look after its files with each of `results`, then with the files."""

    def __init__(self, weight, *results):
        super().__init__(weight)
        self.results, self.num_abandoned = list(results), 0

    def save_result(self, wait_s):
        if not self.results:
            return super().save_result(wait_s)
        if isinstance(self.results[0], Exception):
            raise self.results.pop(0)
        return self.results.pop(0)

    def abandon_save(self):
        self.num_abandoned += 1


def test_both_models_are_committed_when_both_are_written(tmp_path):
    critic, policy = Writing(0.5, None), Writing(0.25, None, None)
    folders = tmp_path / "critic" / "step-1", tmp_path / "checkpoints" / "step-1"
    parts = [
        ModelSave(model, folder, {"step": 1}, 2)
        for model, folder in zip((critic, policy), folders, strict=True)
    ]
    pending = PendingCheckpoint(1, parts)
    for _ in range(3):
        assert not pending.commit_if_written()
        assert [latest_checkpoint(folder.parent) for folder in folders] == [None, None]
    assert pending.commit_if_written()
    assert [latest_checkpoint(folder.parent) for folder in folders] == list(folders)
    assert policy.load_checkpoint(folders[1]) == {"step": 1}


def test_an_abandoned_save_leaves_the_previous_checkpoint_and_no_files(tmp_path):
    PendingCheckpoint(1, [ModelSave(Writing(0.5), tmp_path / "step-1", {}, 2)]).commit()
    policy = Writing(0.25, RuntimeError("rank 1: no space"))
    pending = PendingCheckpoint(2, [ModelSave(policy, tmp_path / "step-2", {}, 2)])
    with pytest.raises(RuntimeError):
        pending.commit()
    pending.abandon()
    assert policy.num_abandoned == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_save_that_takes_too_long_is_a_timeout(tmp_path):
    policy = Writing(0.5, *[None] * 100)
    with pytest.raises(TimeoutError):
        PendingCheckpoint(1, [ModelSave(policy, tmp_path / "step-1", {}, 2)]).commit(0.0)
    assert latest_checkpoint(tmp_path) is None


def test_a_name_in_use_or_unfit_values_are_refused_before_anything_is_copied(tmp_path):
    class Untouched(FilePolicy):
        def start_save(self, folder):
            raise AssertionError("its ranks were asked to save")

    PendingCheckpoint(1, [ModelSave(FilePolicy(0.5), tmp_path / "step-1", {}, 2)]).commit()
    for folder, extra in ((tmp_path / "step-1", {}), (tmp_path / "step-2", {"x": {1, 2}})):
        with pytest.raises(ValueError):
            ModelSave(Untouched(), folder, extra, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]

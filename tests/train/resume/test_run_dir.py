"""An earlier run is never overwritten, never mixed with another one, and goes on where it can."""

import errno
import json
import shutil
import stat

import pytest
import yaml
from omegaconf import OmegaConf

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FORMAT, CheckpointVersionError
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.override_keys import known_keys
from mega_agentrl.report.config_diff import complete_settings
from mega_agentrl.report.run_start import RunStart, append_start
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_dir import (
    MUTABLE_KEYS,
    PrivateFolderCallback,
    changed_keys,
    create_run_dir,
    prepare_run_dir,
    prepare_sweep_dir,
)
from mega_agentrl.train.resume.run_lock import lock_run_dir
from mega_agentrl.train.resume.run_state import RunState
from tests.train.file_policy import FilePolicy

SETTINGS = {
    "total_steps": 10,
    "seed": 1,
    "optim": {"lr": 1e-5, "micro_batch_tokens": 64},
    "cluster": {"ray_address": ""},
    "reward": {"functions": {}},
}


def text(**changes):
    return yaml.safe_dump(SETTINGS | changes)


def begun(run_dir, *, checkpoint=None, finished=False):
    """A folder as a run leaves it."""
    prepare_run_dir(run_dir, text(), resume=True)
    (run_dir / "metrics.jsonl").write_text("a line\n")
    if checkpoint:
        (run_dir / checkpoint).mkdir(parents=True)
        (run_dir / checkpoint / "manifest.json").write_text("{}")
    if finished:
        (run_dir / "summary.json").write_text("{}")


def mode_of(folder):
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_new_folder_is_its_owners_alone_and_its_parents_are_as_usual(tmp_path):
    (tmp_path / "usual").mkdir()
    prepare_run_dir(tmp_path / "runs" / "mine", text(), resume=True)
    assert mode_of(tmp_path / "runs" / "mine") == 0o700
    assert mode_of(tmp_path / "runs") == mode_of(tmp_path / "usual")


@pytest.mark.parametrize("mode", [0o755, 0o2770], ids=["readable", "shared_group"])
def test_a_folder_of_the_users_own_keeps_its_mode(tmp_path, mode):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    begun(run_dir, finished=True)
    assert mode_of(run_dir) == mode
    _, moved = prepare_run_dir(run_dir, text(), resume=True)
    assert mode_of(moved) == mode_of(run_dir) == mode


@pytest.mark.parametrize("event", ["on_run_start", "on_multirun_start"], ids=["run", "sweep"])
def test_the_folder_is_private_before_hydra_creates_it(tmp_path, event):
    folder = tmp_path / "runs" / "mine"
    config = OmegaConf.create({"hydra": {"run": {"dir": folder}, "sweep": {"dir": folder}}})
    getattr(PrivateFolderCallback(), event)(config)
    assert mode_of(folder) == 0o700
    folder.chmod(0o750)
    getattr(PrivateFolderCallback(), event)(config)
    assert mode_of(folder) == 0o750


def test_finished_runs_are_numbered_and_kept(tmp_path):
    run_dir = tmp_path / "deep" / "run"
    for number in (1, 2):
        begun(run_dir, finished=True)
        (run_dir / "metrics.jsonl").write_text(f"run {number}")
        moved = tmp_path / "deep" / f"run.{number}"
        assert prepare_run_dir(run_dir, text(), resume=True) == (False, moved)
        assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]
    kept = [(tmp_path / "deep" / f"run.{n}" / "metrics.jsonl").read_text() for n in (1, 2)]
    assert kept == ["run 1", "run 2"]


@pytest.mark.parametrize("checkpoint", [None, "checkpoints/step-000004", "warm_start/step-000000"])
def test_an_unfinished_run_continues_in_its_folder(tmp_path, checkpoint):
    begun(tmp_path / "run", checkpoint=checkpoint)
    changed = text(total_steps=20, cluster={"ray_address": "10.0.0.1:6379"})
    assert prepare_run_dir(tmp_path / "run", changed, resume=True) == (True, None)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "a line\n"
    assert (tmp_path / "run" / "config.yaml").read_text() == changed
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_resume_an_unfinished_run_is_moved_aside(tmp_path):
    begun(tmp_path / "run", checkpoint="checkpoints/step-000004")
    moved = tmp_path / "run.1"
    assert prepare_run_dir(tmp_path / "run", text(seed=2), resume=False) == (False, moved)
    assert (moved / "checkpoints" / "step-000004" / "manifest.json").exists()


def test_checkpoints_of_other_settings_are_an_error_that_names_the_keys(tmp_path):
    begun(tmp_path / "run", checkpoint="checkpoints/step-000004")
    changed = text(seed=2, total_steps=20, optim={"lr": 0.1, "micro_batch_tokens": 32})
    with pytest.raises(ConfigError) as caught:
        prepare_run_dir(tmp_path / "run", changed, resume=True)
    assert caught.value.key == "run_dir"
    assert caught.value.got.endswith("other values of optim.lr, seed")
    assert (tmp_path / "run" / "config.yaml").read_text() == text()


def test_a_checkpoint_of_an_earlier_version_is_an_error_before_anything_is_written(tmp_path):
    begun(tmp_path / "run", checkpoint="checkpoints/step-000004")
    manifest = tmp_path / "run/checkpoints/step-000004/manifest.json"
    manifest.write_text('{"format": "mega_agentrl checkpoint 2"}')
    with pytest.raises(CheckpointVersionError) as caught:
        prepare_run_dir(tmp_path / "run", text(total_steps=20), resume=True)
    assert caught.value.name == f"format of {manifest}"
    assert caught.value.got == "mega_agentrl checkpoint 2"
    assert caught.value.expected == repr(MANIFEST_FORMAT)
    assert "megatron-core 0.16" in caught.value.cause
    assert (tmp_path / "run" / "config.yaml").read_text() == text()
    assert prepare_run_dir(tmp_path / "run", text(), resume=False) == (False, tmp_path / "run.1")


def test_a_finished_run_of_an_earlier_version_is_moved_aside_as_any_other(tmp_path):
    begun(tmp_path / "run", checkpoint="checkpoints/step-000010", finished=True)
    (tmp_path / "run/summary.json").write_text('{"num_steps": 10}')
    manifest = tmp_path / "run/checkpoints/step-000010/manifest.json"
    manifest.write_text('{"format": "mega_agentrl checkpoint 2"}')
    assert prepare_run_dir(tmp_path / "run", text(), resume=True) == (False, tmp_path / "run.1")


def test_without_a_checkpoint_other_settings_begin_anew(tmp_path):
    begun(tmp_path / "run")
    prepared = prepare_run_dir(tmp_path / "run", text(seed=2), resume=True)
    assert prepared == (False, tmp_path / "run.1")


def test_a_folder_without_a_run_stays(tmp_path):
    (tmp_path / "multirun.yaml").write_text("x")
    assert prepare_run_dir(tmp_path, text(), resume=True) == (False, None)
    assert (tmp_path / "multirun.yaml").exists()


def test_a_setting_that_only_one_side_has_differs():
    assert changed_keys(text(), text(more=None)) == ["more"]
    changed = changed_keys(text(reward={"functions": {"a": "b"}}), text())
    assert changed == ["reward.functions", "reward.functions.a"]
    assert changed_keys("", text(seed=3)) == ["optim.lr", "seed"]


def test_a_setting_that_the_earlier_version_did_not_have_counts_as_its_default():
    assert changed_keys(text(), text(deterministic=False)) == []
    assert changed_keys(text(), text(deterministic=True)) == ["deterministic"]
    plain = {"loss": "clipped", "loss_options": {}}
    filled = complete_settings({"algo": plain})["algo"]["loss_options"]
    assert filled["clip_low"] == 0.2
    assert changed_keys(text(algo=plain), text(algo=plain | {"loss_options": filled})) == []
    other = plain | {"loss_options": filled | {"clip_low": 0.3}}
    assert changed_keys(text(algo=plain), text(algo=other)) == ["algo.loss_options.clip_low"]


def finished(run_dir, *, num_steps, **settings):
    """A folder as a finished run leaves it, with a whole checkpoint."""
    prepare_run_dir(run_dir, text(**settings), resume=True)
    (run_dir / "metrics.jsonl").write_text("a line\n")
    state = RunState(step=num_steps, sampler_state={})
    run_state.save_checkpoint(FilePolicy(), run_dir, state)
    (run_dir / "summary.json").write_text(json.dumps({"num_steps": num_steps}))


LONGER = {
    "more_steps": ({"total_steps": 10}, {"total_steps": 20}, True),
    "more_epochs": ({"total_epochs": 1}, {"total_epochs": 2}, True),
    "epochs_after_steps": ({"total_steps": 10}, {"total_epochs": 3}, True),
    "steps_after_epochs": ({"total_epochs": 1}, {"total_steps": 11}, True),
    "equal": ({"total_epochs": 2}, {"total_epochs": 2}, False),
    "fewer_steps": ({"total_steps": 10}, {"total_steps": 5}, False),
    "fewer_epochs": ({"total_epochs": 2}, {"total_epochs": 1}, False),
    "another_setting": ({"total_steps": 10}, {"total_steps": 20, "seed": 2}, False),
}


@pytest.mark.parametrize(("earlier", "now", "continues"), LONGER.values(), ids=LONGER)
def test_a_finished_run_continues_if_it_is_asked_for_more(tmp_path, earlier, now, continues):
    run_dir = tmp_path / "run"
    finished(run_dir, num_steps=10, **earlier)
    resumed, moved = prepare_run_dir(run_dir, text(**now), resume=True)
    assert (resumed, moved is None) == (continues, continues)
    assert not (run_dir / "summary.json").exists(), "it is unfinished again, or another run"
    assert (run_dir / "checkpoints" / "step-000010").exists() is continues


@pytest.mark.parametrize(
    "summary",
    [b"", b"\0" * 9, b"[" * 100_000, b'{"num_steps": "x"}', b"[]"],
    ids=["empty", "zeros", "depth", "text", "a list"],
)
def test_a_run_whose_summary_is_damaged_continues_with_a_line(tmp_path, summary, caplog):
    run_dir = tmp_path / "run"
    finished(run_dir, num_steps=10)
    (run_dir / "summary.json").write_bytes(summary)
    assert prepare_run_dir(run_dir, text(), resume=True) == (True, None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "settings", [b"a: [", b"a: &a [1]\nb: !!python/object:os.system {}", b"\0"]
)
def test_settings_that_are_no_yaml_are_an_error_that_names_the_folder(tmp_path, settings):
    begun(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_bytes(settings)
    with pytest.raises(ConfigError) as caught:
        prepare_run_dir(tmp_path / "run", text(), resume=True)
    assert caught.value.key == "run_dir"


@pytest.mark.parametrize("name", ["run.lock", "starts.jsonl", "metrics.jsonl", "logs/driver.log"])
def test_a_folder_in_which_a_file_is_a_link_is_refused_before_anything_is_written(tmp_path, name):
    run_dir, target = tmp_path / "run", tmp_path / "thesis.txt"
    (run_dir / "logs").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (run_dir / "checkpoints").symlink_to(tmp_path / "disk")
    with lock_run_dir(run_dir):
        pass
    target.write_text("dear")
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(target)
    with pytest.raises(ConfigError) as caught, lock_run_dir(run_dir):
        pass
    assert caught.value.key == "run_dir"
    assert name in caught.value.got
    assert target.read_text() == "dear"


def test_a_finished_run_without_its_checkpoint_starts_anew(tmp_path):
    finished(tmp_path / "run", num_steps=10)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    moved = tmp_path / "run.1"
    assert prepare_run_dir(tmp_path / "run", text(total_steps=20), resume=True) == (False, moved)


def test_a_second_start_in_a_folder_is_refused_and_names_the_first(tmp_path):
    start = RunStart(time="", host="node-3", pid=4711, command="", working_folder="")
    append_start(tmp_path, start)
    with lock_run_dir(tmp_path), pytest.raises(ConfigError) as caught, lock_run_dir(tmp_path):
        pass
    assert caught.value.key == "run_dir"
    assert "node-3" in caught.value.got and "4711" in caught.value.got
    with lock_run_dir(tmp_path):
        pass


def test_a_folder_on_a_file_system_without_locks_is_used_without_one(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with lock_run_dir(tmp_path):
        pass
    assert "No locks available" in caplog.text


def test_a_sweep_moves_a_finished_run_out_of_its_folder(tmp_path):
    begun(tmp_path / "run", finished=True)
    assert prepare_sweep_dir(tmp_path / "run", resume=True) == tmp_path / "run.1"
    assert list((tmp_path / "run").iterdir()) == []
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    assert prepare_sweep_dir(tmp_path / "run", resume=True) is None


def test_a_sweep_leaves_its_own_jobs_and_an_unfinished_run_where_they_are(tmp_path):
    begun(tmp_path / "mixed", finished=True)
    (tmp_path / "mixed" / "0-a").mkdir()
    (tmp_path / "mixed" / "0-a" / "sweep_job.json").write_text("{}")
    assert prepare_sweep_dir(tmp_path / "mixed", resume=True) is None
    begun(tmp_path / "run", checkpoint="checkpoints/step-000004")
    with pytest.raises(ConfigError) as caught:
        prepare_sweep_dir(tmp_path / "run", resume=True)
    assert caught.value.key == "run_dir"
    assert prepare_sweep_dir(tmp_path / "run", resume=False) == tmp_path / "run.1"


def test_keys_that_may_differ_are_settings():
    keys = list(known_keys())
    for mutable in MUTABLE_KEYS:
        is_section = mutable[-1] == "."
        assert mutable in keys or (is_section and any(key.startswith(mutable) for key in keys))


def test_the_run_folder_is_created_and_tried(tmp_path):
    create_run_dir(tmp_path / "a" / "run")
    create_run_dir(tmp_path / "a" / "run")
    assert list((tmp_path / "a" / "run").iterdir()) == []
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError) as caught:
            create_run_dir(folder)
        assert (caught.value.key, caught.value.got) == ("run_dir", str(folder))


def test_a_run_folder_without_room_for_a_file_is_refused(tmp_path, monkeypatch):
    def fail(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(ConfigError) as caught:
        create_run_dir(tmp_path / "run")
    assert caught.value.key == "run_dir"
    assert "No space left" in caught.value.cause

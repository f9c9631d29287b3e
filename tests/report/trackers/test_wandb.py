"""Calls to W&B, with a fake that has the parameters of wandb 0.2x that the tracker uses."""

import pytest

from mega_agentrl.report.trackers.wandb import WandbTracker
from tests.config.refusals import refused


class Config(dict):
    def update(self, d, allow_val_change=None):
        assert allow_val_change or not set(self) & set(d), "wandb refuses changed values"
        super().update(d)


class Run:
    def __init__(self, run_id):
        self.id = run_id
        self.config = Config()
        self.defined, self.logged, self.finished = [], [], 0

    def define_metric(self, name, step_metric=None, hidden=None):
        self.defined.append((name, step_metric))

    def log(self, data):  # without a step: wandb wants steps that grow over the whole run
        self.logged.append(data)

    def finish(self):
        self.finished += 1


class Wandb:
    """The package; `runs` by id, as its server would keep them."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self):
        self.runs, self.opened, self.is_reachable = {}, [], True

    def init(self, *, dir, id, name, resume):
        assert resume == "allow"
        if not self.is_reachable:
            raise self.errors.Error("no API key")
        self.opened.append((name, dir, id))
        run_id = id or f"run{len(self.runs)}"
        return self.runs.setdefault(run_id, Run(run_id))


def test_each_stage_has_steps_of_its_own(tmp_path):
    wandb = Wandb()
    tracker = WandbTracker(wandb, tmp_path / "smoke", "")
    tracker.log_config({"seed": 1}, "seed: 1\n")
    tracker.log("sft", 7, {"loss": 2.0})
    tracker.log("rl", 1, {"actor/loss": 0.5})
    tracker.log("rl", 2, {"actor/loss": 0.25})
    tracker.close()
    tracker.close()
    run = wandb.runs[tracker.run_id]
    assert wandb.opened == [("smoke", str(tmp_path / "smoke"), None)]
    assert run.config == {"seed": 1}
    assert run.defined[:2] == [("sft/step", None), ("sft/*", "sft/step")]
    assert run.defined[2:] == [("rl/step", None), ("rl/*", "rl/step")]
    assert run.logged == [
        {"sft/loss": 2.0, "sft/step": 7},
        {"rl/actor/loss": 0.5, "rl/step": 1},
        {"rl/actor/loss": 0.25, "rl/step": 2},
    ]
    assert run.finished == 1


def test_a_run_goes_on_with_other_settings(tmp_path):
    wandb = Wandb()
    first = WandbTracker(wandb, tmp_path, "")
    first.log_config({"seed": 1, "total_steps": 2}, "")
    second = WandbTracker(wandb, tmp_path, first.run_id)
    second.log_config({"seed": 1, "total_steps": 9}, "")
    assert list(wandb.runs) == [first.run_id] == [second.run_id]
    assert wandb.runs[first.run_id].config["total_steps"] == 9


def test_a_missing_login_is_refused(tmp_path):
    wandb = Wandb()
    wandb.is_reachable = False
    error = refused(WandbTracker, wandb, tmp_path, "")
    assert (error.key, error.got) == ("report.trackers", "wandb")
    assert "no API key" in error.cause


def test_the_real_package_works_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb, an optional package, is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = ""
    for step in (1, 2):
        tracker = WandbTracker(wandb, tmp_path, run_id)
        tracker.log_config({"seed": step}, f"seed: {step}\n")
        tracker.log("rl", step, {"actor/loss": 0.5})
        tracker.close()
        assert run_id in ("", tracker.run_id)
        run_id = tracker.run_id
    assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/*.wandb"))

"""Open trackers: missing packages are errors, settings are logged, runs are continued."""

import json

import pytest
import yaml

from mega_agentrl.config.checks import inputs
from mega_agentrl.config.enums import TrackerName
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.runtime import ReportConfig
from mega_agentrl.report.run_start import RunStart, append_start
from mega_agentrl.report.trackers import factory as module
from mega_agentrl.report.trackers.factory import open_trackers
from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker


class Recorder:
    """A tracker that records its calls."""

    def __init__(self, package, run_dir, run_id):
        self.run_id = run_id or f"{package}-1"
        self.given_run_id = run_id
        self.calls = []

    def log_config(self, settings, text):
        self.calls.append((settings, text))

    def log(self, stage, step, numbers):
        self.calls.append((stage, step, numbers))

    def close(self):
        self.calls.append("close")


@pytest.fixture
def recorders(monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: name)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: name)
    monkeypatch.setattr(module, "WandbTracker", Recorder)
    monkeypatch.setattr(module, "MlflowTracker", Recorder)


def test_a_missing_package_is_found_before_anything_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    config = ReportConfig(trackers=[TrackerName.tensorboard, TrackerName.wandb])
    with pytest.raises(ConfigError) as caught, open_trackers(tmp_path, config):
        pytest.fail("opened")
    assert (caught.value.key, caught.value.got) == ("report.trackers", TrackerName.wandb)
    assert not list(tmp_path.iterdir()), "something was started before it was found"


def test_settings_are_logged_and_everything_is_closed(tmp_path, recorders):
    (tmp_path / "config.yaml").write_text("seed: 1\nreport:\n  trace_destination: ''\n")
    config = ReportConfig(trackers=[TrackerName.wandb, TrackerName.mlflow])
    with pytest.raises(KeyError), open_trackers(tmp_path, config) as trackers:
        raise KeyError
    text = "seed: 1\nreport:\n  trace_destination: ''\n"
    for tracker in trackers:
        assert tracker.calls == [({"seed": 1, "report.trace_destination": ""}, text), "close"]


def test_what_ran_is_logged_beside_the_settings(tmp_path, recorders):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    for host in ("node-1", "node-2"):
        start = RunStart(
            time="now",
            host=host,
            pid=4711,
            command="python -m mega_agentrl",
            working_folder="/home/me",
            versions={"torch": "2.13.0"},
        )
        append_start(tmp_path, start)
    with open_trackers(tmp_path, ReportConfig(trackers=[TrackerName.wandb])) as (tracker,):
        ((settings, text),) = tracker.calls
    assert settings["seed"] == 1 and settings["start.host"] == "node-2"
    assert settings["start.versions.torch"] == "2.13.0"
    assert yaml.safe_load(text) == {"seed": 1}, "the start is in comments"
    assert '# start.command: "python -m mega_agentrl"' in text


def test_a_second_start_goes_on_with_the_same_runs(tmp_path, recorders):
    config = ReportConfig(trackers=[TrackerName.wandb])
    with open_trackers(tmp_path, config) as (first,):
        assert first.given_run_id == ""
    both = ReportConfig(trackers=[TrackerName.mlflow, TrackerName.wandb])
    with open_trackers(tmp_path, both) as (other, second):
        assert (other.given_run_id, second.given_run_id) == ("", first.run_id)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {
        "wandb": "wandb-1",
        "mlflow": "mlflow-1",
    }


def test_tensorboard_is_the_default_and_none_is_possible(tmp_path):
    with open_trackers(tmp_path, ReportConfig()) as (only,):
        assert isinstance(only, TensorBoardTracker)
    with open_trackers(tmp_path, ReportConfig(trackers=[])) as trackers:
        assert not trackers
    assert not (tmp_path / "trackers.json").exists()

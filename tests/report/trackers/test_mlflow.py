"""Calls to MLflow, with a fake that has the parameters of mlflow 3 that the tracker uses."""

from types import SimpleNamespace

import pytest

from mega_agentrl.report.trackers.mlflow import MlflowTracker
from tests.config.refusals import refused


class Mlflow:
    """The package; `runs` by id, as its server would keep them."""

    class exceptions:
        class MlflowException(Exception):
            pass

    def __init__(self):
        self.runs, self.active, self.is_reachable = {}, None, True

    def _reach(self):
        if not self.is_reachable:
            raise self.exceptions.MlflowException("connection refused")

    def start_run(self, run_id=None, run_name=None):
        self._reach()
        assert self.active is None, "mlflow has one run at a time"
        assert run_id is None or run_name is None, "mlflow would rename the run"
        run_id = run_id or f"run{len(self.runs)}"
        self.active = self.runs.setdefault(
            run_id, {"name": run_name, "params": {}, "metrics": [], "texts": {}}
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        assert len(params) <= 100
        assert not set(self.active["params"]) & set(params), "mlflow refuses changed values"
        self.active["params"] |= params

    def log_metrics(self, metrics, step=None):
        self._reach()
        self.active["metrics"].append((step, metrics))

    def log_text(self, text, artifact_file):
        self.active["texts"][artifact_file] = text

    def end_run(self):
        self.active = None


def test_numbers_and_settings_arrive_under_names_that_it_takes(tmp_path):
    mlflow = Mlflow()
    tracker = MlflowTracker(mlflow, tmp_path / "smoke", "")
    settings = {f"key{n}": n for n in range(150)} | {"reward.rubric.a?b": "x" * 900}
    tracker.log_config(settings, "seed: 1\n")
    tracker.log("rl", 3, {"actor/loss": 0.5, "success/a?b": 1})
    tracker.close()
    tracker.close()
    assert mlflow.active is None
    run = mlflow.runs[tracker.run_id]
    assert run["name"] == "smoke"
    assert len(run["params"]) == 151 and run["params"]["key149"] == "149"
    assert run["params"]["reward.rubric.a_b"] == "x" * 500
    assert run["texts"] == {"config.yaml": "seed: 1\n"}
    assert run["metrics"] == [(3, {"rl/actor/loss": 0.5, "rl/success/a_b": 1.0})]


def test_a_run_goes_on_with_the_parameters_it_began_with(tmp_path):
    mlflow = Mlflow()
    first = MlflowTracker(mlflow, tmp_path, "")
    first.log_config({"total_steps": 2}, "total_steps: 2\n")
    first.close()
    second = MlflowTracker(mlflow, tmp_path, first.run_id)
    second.log_config({"total_steps": 9}, "total_steps: 9\n")
    second.close()
    assert list(mlflow.runs) == [first.run_id] == [second.run_id]
    run = mlflow.runs[first.run_id]
    assert run["params"] == {"total_steps": "2"}
    assert run["texts"] == {"config.yaml": "total_steps: 9\n"}


def test_a_missing_server_is_refused_and_a_lost_one_is_a_warning(tmp_path, caplog):
    mlflow = Mlflow()
    tracker = MlflowTracker(mlflow, tmp_path, "")
    mlflow.is_reachable = False
    tracker.log("rl", 3, {"a": 1.0})
    assert "rl step 3" in caplog.text and "connection refused" in caplog.text
    mlflow.is_reachable = True
    tracker.log("rl", 4, {"a": 2.0})
    assert mlflow.active["metrics"] == [(4, {"rl/a": 2.0})]
    tracker.close()
    mlflow.is_reachable = False
    error = refused(MlflowTracker, mlflow, tmp_path, "")
    assert (error.key, error.got) == ("report.trackers", "mlflow")
    assert "connection refused" in error.cause


def test_the_real_package_writes_to_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow, an optional package, is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_id = ""
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25)):
        tracker = MlflowTracker(mlflow, tmp_path, run_id)
        tracker.log_config({"seed": step}, f"seed: {step}\n")
        tracker.log("rl", step, {"actor/loss": loss, "success/a?b": 1.0})
        tracker.close()
        assert run_id in ("", tracker.run_id)
        run_id = tracker.run_id
    run = mlflow.get_run(run_id)
    assert run.data.params == {"seed": "1"}
    assert run.data.metrics == {"rl/actor/loss": 0.25, "rl/success/a_b": 1.0}
    history = mlflow.MlflowClient().get_metric_history(run_id, "rl/actor/loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/config.yaml") == "seed: 3\n"

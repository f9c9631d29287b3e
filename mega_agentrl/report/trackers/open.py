"""Opens the trackers a run asks for, before anything else of it starts.

An optional package that is missing, and a port that is taken, are errors that name their key.
What each tracker calls the run is kept in `trackers.json` of the run folder, so that a run that
goes on is continued there, too.
"""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.check_report import OPTIONAL, check_report
from mega_agentrl.config.choices import TrackerName
from mega_agentrl.report.config_diff import read_config
from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.wandb import WandbTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mega_agentrl.config.schema import ReportConfig
    from mega_agentrl.types.watch import Tracker

RUN_IDS = "trackers.json"
CONFIG = "config.yaml"


@contextmanager
def open_trackers(run_dir: Path, config: ReportConfig) -> Iterator[Sequence[Tracker]]:
    """All trackers of the run, with its settings logged; closes them on the way out.

    The settings are those of `config.yaml` in the run folder, where it is there. Raises
    `ValueError` for a package that is not installed and a port that cannot be had.
    """
    check_report(config)
    packages = {name: _package(name) for name in config.trackers}
    run_ids = _read_ids(run_dir)
    path = run_dir / CONFIG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.prometheus_port:
            trackers.append(PrometheusTracker(config.prometheus_port))
            stack.callback(trackers[-1].close)
        for name, package in packages.items():
            tracker = _open(name, package, run_dir, run_ids.get(name.value, ""))
            stack.callback(tracker.close)
            trackers.append(tracker)
            if tracker.run_id:
                run_ids[name.value] = tracker.run_id
                _write_ids(run_dir, run_ids)
        for tracker in trackers:
            tracker.configure(read_config(path), text)
        yield trackers


def _package(name: TrackerName) -> Any:
    return importlib.import_module(name.value) if name in OPTIONAL else None


def _open(name: TrackerName, package: Any, run_dir: Path, run_id: str) -> Tracker:
    match name:
        case TrackerName.wandb:
            return WandbTracker(package, run_dir, run_id)
        case TrackerName.mlflow:
            return MlflowTracker(package, run_dir, run_id)
    # It brings torch, which takes seconds.
    from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run_dir)


def _read_ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / RUN_IDS
    if not path.is_file():
        return {}
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write_ids(run_dir: Path, run_ids: dict[str, str]) -> None:
    path = run_dir / RUN_IDS
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(run_ids, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)

"""Open the trackers of a run before anything else starts.

A missing optional package or a port in use is an error that names the configuration key. The
trackers' run ids are saved in `trackers.json` of the run folder, so that a resumed run continues
there.

To add a tracker:

1. Write a class with the protocol `types.monitoring.Tracker` in a new module here.
2. Add its name to `config.enums.TrackerName`, and return it from `_open_tracker`.
3. For an optional package, add it to `OPTIONAL_TRACKERS` and to the extras in `pyproject.toml`.
4. Test it in `tests/report/trackers`, and list it in `TRACKERS` of `tests/types/test_protocols.py`.
"""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.checks.inputs import OPTIONAL_TRACKERS, check_report
from mega_agentrl.config.enums import TrackerName
from mega_agentrl.report.config_diff import read_config
from mega_agentrl.report.run_start import read_starts
from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.wandb import WandbTracker
from mega_agentrl.types.atomic_file import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mega_agentrl.config.sections.runtime import ReportConfig
    from mega_agentrl.types.monitoring import Tracker

RUN_IDS_FILE = "trackers.json"
CONFIG_FILE = "config.yaml"


@contextmanager
def open_trackers(run_dir: Path, config: ReportConfig) -> Iterator[Sequence[Tracker]]:
    """Open all trackers of the run, log its settings and start, and close them on exit.

    The settings are read from `config.yaml` in the run folder, and the start from `starts.jsonl`,
    if they exist. Facts of the start are named `start.versions.torch`, for example.

    Raises:
        ValueError: a package is not installed or a port is in use.
    """
    check_report(config)
    packages = {name: _import_package(name) for name in config.trackers}
    run_ids = _read_run_ids(run_dir)
    path = run_dir / CONFIG_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.prometheus_port:
            trackers.append(PrometheusTracker(config.prometheus_host, config.prometheus_port))
            stack.callback(trackers[-1].close)
        for name, package in packages.items():
            tracker = _open_tracker(name, package, run_dir, run_ids.get(name.value, ""))
            stack.callback(tracker.close)
            trackers.append(tracker)
            if tracker.run_id:
                run_ids[name.value] = tracker.run_id
                _write_run_ids(run_dir, run_ids)
        settings = read_config(path)
        for start in read_starts(run_dir)[-1:]:
            facts = {f"start.{name}": fact for name, fact in start.facts().items()}
            settings |= facts
            text += "".join(f"# {name}: {json.dumps(fact)}\n" for name, fact in facts.items())
        for tracker in trackers:
            tracker.log_config(settings, text)
        yield trackers


def _import_package(name: TrackerName) -> Any:
    return importlib.import_module(name.value) if name in OPTIONAL_TRACKERS else None


def _open_tracker(name: TrackerName, package: Any, run_dir: Path, run_id: str) -> Tracker:
    match name:
        case TrackerName.wandb:
            return WandbTracker(package, run_dir, run_id)
        case TrackerName.mlflow:
            return MlflowTracker(package, run_dir, run_id)
    # Imports torch, which takes seconds.
    from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run_dir)


def _read_run_ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / RUN_IDS_FILE
    if not path.is_file():
        return {}
    run_ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return run_ids


def _write_run_ids(run_dir: Path, run_ids: dict[str, str]) -> None:
    atomic_write(run_dir / RUN_IDS_FILE, json.dumps(run_ids, indent=1) + "\n")

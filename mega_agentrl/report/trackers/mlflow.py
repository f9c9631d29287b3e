"""MLflow. Server and experiment are its own variables' business: MLFLOW_TRACKING_URI (without a
server sqlite:///mlflow.db, or file:... with MLFLOW_ALLOW_FILE_STORE=true) and
MLFLOW_EXPERIMENT_NAME.

Its parameters never change once they are written, so a run that goes on keeps those it began
with; `config.yaml` among its artifacts is always the newest.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
"""In names of metrics and parameters."""

_MOST_CHARS = 500
"""Of a parameter's value; older servers take no more."""

_MOST_AT_ONCE = 100
"""Parameters in a call; the server takes no more."""


class MlflowTracker:
    """A `types.watch.Tracker`. mlflow: the package. run_id: of the run to go on with, or empty.

    Raises `ValueError` where no run can be had; later faults of the server are a warning each, as
    no training ends for its metrics.
    """

    def __init__(self, mlflow: Any, run_dir: Path, run_id: str) -> None:
        self._mlflow = mlflow
        self._is_new = not run_id
        try:
            run = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else run_dir.name)
        except mlflow.exceptions.MlflowException as error:
            raise ValueError(
                f"report.trackers=mlflow: {error}; expected a server that takes a run; probable "
                "cause: MLFLOW_TRACKING_URI names none (sqlite:///mlflow.db needs none)"
            ) from error
        self.run_id: str = run.info.run_id
        self._is_open = True

    def configure(self, settings: Mapping[str, object], text: str) -> None:
        """See `types.watch.Tracker`."""
        if self._is_new:
            values = {_plain(key): str(value)[:_MOST_CHARS] for key, value in settings.items()}
            for part in _parts(values, _MOST_AT_ONCE):
                self._mlflow.log_params(part)
        self._mlflow.log_text(text, "config.yaml")

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """See `types.watch.Tracker`."""
        named = {_plain(f"{stage}/{name}"): float(value) for name, value in numbers.items()}
        try:
            self._mlflow.log_metrics(named, step=step)
        except self._mlflow.exceptions.MlflowException as error:
            _log.warning("mlflow: the metrics of %s step %d are lost there: %s", stage, step, error)

    def close(self) -> None:
        """See `types.watch.Tracker`."""
        if self._is_open:
            self._is_open = False
            self._mlflow.end_run()


def _plain(name: str) -> str:
    """A name that MLflow takes."""
    return _FORBIDDEN.sub("_", name)


def _parts(values: Mapping[str, str], size: int) -> Iterator[dict[str, str]]:
    items = list(values.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])

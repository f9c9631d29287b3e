"""MLflow tracker.

MLflow reads server and experiment from its own variables: MLFLOW_TRACKING_URI (without a server
sqlite:///mlflow.db, or file:... with MLFLOW_ALLOW_FILE_STORE=true) and MLFLOW_EXPERIMENT_NAME.

Its parameters are immutable, so that a resumed run keeps its first ones; the artifact `config.yaml`
is always the latest.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_logger = logging.getLogger(__name__)

_INVALID_NAME_CHARS = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that are invalid in names of metrics and parameters."""

_MAX_PARAM_CHARS = 500
"""Maximum length of a parameter's value on older servers."""

_MAX_PARAMS_PER_CALL = 100
"""Maximum number of parameters per call."""


class MlflowTracker:
    """Logs metrics to an MLflow run; later server errors are only warnings.

    Args:
        mlflow: the package.
        run_dir: folder whose name is that of a new run.
        run_id: run to continue, or empty.

    Raises:
        ValueError: the run cannot be created.
    """

    def __init__(self, mlflow: Any, run_dir: Path, run_id: str) -> None:
        self._mlflow = mlflow
        self._is_new = not run_id
        try:
            run = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else run_dir.name)
        except mlflow.exceptions.MlflowException as error:
            raise ConfigError(
                "report.trackers",
                "mlflow",
                "a server that accepts a run (MLFLOW_TRACKING_URI; sqlite:///mlflow.db needs none)",
                str(error),
            ) from error
        self.run_id: str = run.info.run_id
        self._is_open = True

    def log_config(self, settings: Mapping[str, object], text: str) -> None:
        """Log the settings as parameters of a new run, and the yaml text as an artifact."""
        if self._is_new:
            values = {
                _sanitize_name(key): str(value)[:_MAX_PARAM_CHARS]
                for key, value in settings.items()
            }
            for chunk in _chunks(values, _MAX_PARAMS_PER_CALL):
                self._mlflow.log_params(chunk)
        self._mlflow.log_text(text, "config.yaml")

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log metrics as `stage/name`."""
        named = {_sanitize_name(f"{stage}/{name}"): float(value) for name, value in numbers.items()}
        try:
            self._mlflow.log_metrics(named, step=step)
        except self._mlflow.exceptions.MlflowException as error:
            _logger.warning(
                "mlflow: the metrics of %s step %d were not recorded: %s", stage, step, error
            )

    def close(self) -> None:
        """End the run; safe to call twice."""
        if self._is_open:
            self._is_open = False
            self._mlflow.end_run()


def _sanitize_name(name: str) -> str:
    """Replace characters that are invalid in MLflow names."""
    return _INVALID_NAME_CHARS.sub("_", name)


def _chunks(values: Mapping[str, str], size: int) -> Iterator[dict[str, str]]:
    items = list(values.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])

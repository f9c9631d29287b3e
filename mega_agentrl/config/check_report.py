"""Conditions of `report.*` that reach beyond the settings: the packages it needs are there.

`importlib` looks for them without importing any, so that a login node answers at once.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import TrackerName

if TYPE_CHECKING:
    from mega_agentrl.config.schema import ReportConfig

OPTIONAL = (TrackerName.wandb, TrackerName.mlflow)
"""Packages of the same name that are installed for them alone."""


def check_report(report: ReportConfig) -> None:
    """Raise `ValueError` for a tracker whose package is not installed."""
    for name in report.trackers:
        if name in OPTIONAL and find_spec(name.value) is None:
            raise ValueError(
                f"report.trackers={name}: the package {name} is not installed, expected it beside "
                f"this one (`pip install {name}`); probable cause: it is optional, and another "
                f"environment had it. Or leave {name} out of report.trackers"
            )

"""Check that the packages of `report.trackers` are installed, without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import TrackerName

if TYPE_CHECKING:
    from mega_agentrl.config.schema import ReportConfig

OPTIONAL_TRACKERS = (TrackerName.wandb, TrackerName.mlflow)
"""Trackers that need an optional package of the same name."""


def check_report(report: ReportConfig) -> None:
    """Raise a `ValueError` for a tracker whose package is not installed."""
    for name in report.trackers:
        if name in OPTIONAL_TRACKERS and find_spec(name.value) is None:
            raise ValueError(
                f"report.trackers={name}: the package {name} is not installed, expected it in "
                f"this environment (`pip install {name}`); probable cause: it is optional. Or "
                f"remove {name} from report.trackers"
            )

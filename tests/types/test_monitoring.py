"""Every tracker implements the protocol; monitors may be absent."""

import inspect

import pytest

from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker
from mega_agentrl.report.trackers.wandb import WandbTracker
from mega_agentrl.types.monitoring import Monitors, Tracker


@pytest.mark.parametrize(
    "kind", [TensorBoardTracker, WandbTracker, MlflowTracker, PrometheusTracker]
)
@pytest.mark.parametrize("method", ["log_config", "log", "close"])
def test_trackers_have_the_signatures_of_the_protocol(kind, method):
    expected = inspect.signature(getattr(Tracker, method))
    assert inspect.signature(getattr(kind, method)) == expected


def test_all_monitors_are_optional():
    monitors = Monitors()
    assert (
        monitors.trackers,
        monitors.gpu,
        monitors.rollout_spans,
        monitors.gpu_name,
    ) == ((), None, None, "")

"""Every tracker has what the protocol says, with its arguments; a watch may be empty."""

import inspect

import pytest

from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker
from mega_agentrl.report.trackers.wandb import WandbTracker
from mega_agentrl.types.watch import Tracker, Watch


@pytest.mark.parametrize(
    "kind", [TensorBoardTracker, WandbTracker, MlflowTracker, PrometheusTracker]
)
@pytest.mark.parametrize("method", ["configure", "log", "close"])
def test_methods_take_what_the_protocol_says(kind, method):
    asked = inspect.signature(getattr(Tracker, method))
    assert inspect.signature(getattr(kind, method)) == asked


def test_nothing_has_to_look():
    watch = Watch()
    assert (watch.trackers, watch.gpus, watch.spans, watch.gpu_name) == ((), None, None, "")

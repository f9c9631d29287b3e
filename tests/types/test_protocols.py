"""Classes have the signatures of the protocols that they are used as."""

import inspect

import pytest

from mega_agentrl.report.trackers.mlflow import MlflowTracker
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker
from mega_agentrl.report.trackers.wandb import WandbTracker
from mega_agentrl.types.monitoring import Tracker
from mega_agentrl.types.protocols import Stateful

TRACKERS = [TensorBoardTracker, WandbTracker, MlflowTracker, PrometheusTracker]


class Counter:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_anything_with_a_state_is_stateful():
    assert isinstance(Counter(), Stateful)
    assert not isinstance(object(), Stateful)


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("method", ["log_config", "log", "close"])
def test_trackers_have_the_signatures_of_the_protocol(tracker, method):
    expected = inspect.signature(getattr(Tracker, method))
    assert inspect.signature(getattr(tracker, method)) == expected

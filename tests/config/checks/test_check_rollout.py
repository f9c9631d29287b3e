"""Settings that asynchronous rollouts exclude."""

import warnings

import pytest

from mega_agentrl.config.checks.rollout import check_staleness
from mega_agentrl.config.enums import RolloutCorrection
from mega_agentrl.config.schema import TrainConfig
from tests.config.refusals import refused_setting


@pytest.fixture
def config():
    made = TrainConfig()
    made.rollout.max_staleness = 2
    made.algo.rollout_correction = RolloutCorrection.token_truncate
    return made


def test_staleness_with_a_correction_passes_silently(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_staleness(config)
        check_staleness(TrainConfig())


def test_staleness_without_a_correction_warns(config):
    config.algo.rollout_correction = RolloutCorrection.none
    with pytest.warns(
        UserWarning, match=r"rollout.max_staleness=2: .*algo.rollout_correction=token_truncate"
    ):
        check_staleness(config)


def test_partial_rollouts_are_refused(config):
    config.rollout.partial_rollout = True
    assert refused_setting(check_staleness, config) == ("rollout.partial_rollout", True)


def test_deterministic_runs_are_refused(config):
    config.deterministic = True
    assert refused_setting(check_staleness, config) == ("deterministic", True)
    config.rollout.max_staleness = 1
    check_staleness(config)

"""What rollouts ahead of the learning step do not go with."""

import warnings

import pytest

from mega_agentrl.config.check_staleness import check_staleness
from mega_agentrl.config.choices import Correction
from mega_agentrl.config.schema import TrainConfig


@pytest.fixture
def config():
    made = TrainConfig()
    made.rollout.staleness = 2
    made.algo.correction = Correction.token_truncate
    return made


def test_with_a_correction_it_is_fine_and_says_nothing(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_staleness(config)
        check_staleness(TrainConfig())


def test_without_one_there_is_a_warning_that_names_the_cure(config):
    config.algo.correction = Correction.none
    with pytest.warns(UserWarning, match=r"rollout.staleness=2: .*algo.correction=token_truncate"):
        check_staleness(config)


def test_what_has_no_bound_is_refused(config):
    config.rollout.carry_over = True
    with pytest.raises(ValueError, match=r"rollout.carry_over=True: .*rollout.staleness=2"):
        check_staleness(config)


def test_what_promises_equal_numbers_is_refused(config):
    config.deterministic = True
    with pytest.raises(ValueError, match=r"deterministic=True: .*rollout.staleness=1 or 0, got 2"):
        check_staleness(config)
    config.rollout.staleness = 1
    check_staleness(config)

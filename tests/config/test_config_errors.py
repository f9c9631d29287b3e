"""The message of a setting's error, and its way through a process boundary."""

import pickle

import pytest

from mega_agentrl.config.enums import KlPlacement
from mega_agentrl.config.errors import ConfigError, check_range


def test_the_message_has_key_value_expected_value_and_cause():
    assert str(ConfigError("a.b", 0, "at least 1")) == "a.b=0: expected at least 1"
    error = ConfigError("a.b", "x y", "a path", "a typo")
    assert str(error) == "a.b='x y': expected a path; probable cause: a typo"
    assert str(ConfigError("k", KlPlacement.loss, "reward")) == "k=loss: expected reward"


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("a.b", [1], "two", "a typo")))
    assert (error.key, error.got, error.expected, error.cause) == ("a.b", [1], "two", "a typo")


def test_only_a_broken_range_raises():
    check_range(True, "a.b", 1, "at least 1")
    with pytest.raises(ConfigError) as caught:
        check_range(False, "a.b", 0, "at least 1")
    assert (caught.value.key, caught.value.got) == ("a.b", 0)

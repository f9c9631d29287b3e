"""The error of a setting, also in another process."""

import pickle

import pytest

from mega_agentrl.config.enums import KlPlacement
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.types.records import ToolStatus


def test_the_message_and_the_attributes_survive_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("a.b", "x y", "a path", "a typo")))
    assert (error.key, error.got, error.expected, error.cause) == ("a.b", "x y", "a path", "a typo")
    assert str(error) == "a.b='x y': expected a path; probable cause: a typo"
    assert str(ConfigError("k", KlPlacement.loss, "reward")) == "k=loss: expected reward"


def test_values_that_fit_end_the_message():
    error = ConfigError("a.b", 3, "2 or 4", "a typo", {"a.b": 2, "a.c": 1})
    error = pickle.loads(pickle.dumps(error))
    assert error.solution == {"a.b": 2, "a.c": 1}
    assert error.overrides == "a.b=2 a.c=1"
    assert str(error) == f"{error.problem}; these values fit: a.b=2 a.c=1"


def test_only_a_broken_range_raises():
    check_range(True, "a.b", 1, "at least 1")
    with pytest.raises(ConfigError) as caught:
        check_range(False, "a.b", 0, "at least 1")
    assert (caught.value.key, caught.value.got) == ("a.b", 0)


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        ([KlPlacement.loss, KlPlacement.reward], "['loss', 'reward']"),
        ((KlPlacement.loss,), "('loss',)"),
        ({KlPlacement.loss: {"b": KlPlacement.reward}}, "{'loss': {'b': 'reward'}}"),
        (ToolStatus.ok, "ok"),
        ([ToolStatus.ok], "['ok']"),
    ],
    ids=["list", "tuple", "mapping", "alone", "of_another_enumeration"],
)
def test_members_of_enumerations_are_shown_by_their_values(got, shown):
    assert str(ConfigError("k", got, "another")) == f"k={shown}: expected another"


def test_a_choice_of_a_setting_has_the_repr_of_its_value():
    assert f"{[KlPlacement.loss]}" == "['loss']" and f"{KlPlacement.loss!r}" == "'loss'"

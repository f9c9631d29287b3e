"""Hydra reads enumerations by name; names must equal values."""

import inspect
from enum import StrEnum

import pytest

from mega_agentrl.config import enums

ENUMS = [
    kind
    for _, kind in inspect.getmembers(enums, inspect.isclass)
    if issubclass(kind, StrEnum) and kind is not StrEnum
]


@pytest.mark.parametrize("kind", ENUMS)
def test_names_equal_values(kind):
    assert len(kind) >= 2
    for member in kind:
        assert member.name == member.value
    assert kind.__doc__

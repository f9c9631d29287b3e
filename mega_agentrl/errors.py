"""The error of a value that someone brought: a setting, a file, a table, an argument."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

_MAX_SHOWN_CHARS = 500
"""Length from which a value is abbreviated in a message."""


class InputError(ValueError):
    """A value is not what it has to be.

    The message is one line: `name: got ..., expected ...; probable cause: ...`. Callers and tests
    read the attributes, so that the wording may change.
    """

    def __init__(self, name: str, got: object, expected: str, cause: str = "") -> None:
        """Create the error.

        Args:
            name: what has the value, as precisely as it is known: a key, a file with row and
                field, an argument, a tensor.
            got: the value. Of a large object the part that is wrong: a shape, a count, a type.
            expected: what the value should be.
            cause: probable cause; empty if the value alone explains the error.
        """
        super().__init__(name, got, expected, cause)
        self.name = name
        self.got = got
        self.expected = expected
        self.cause = cause

    def __str__(self) -> str:
        """Return the message."""
        cause = f"; probable cause: {self.cause}" if self.cause else ""
        return f"{self.name}: got {abbreviate(self.got)}, expected {self.expected}{cause}"


def abbreviate(value: object) -> str:
    """Return the value as text of at most about `_MAX_SHOWN_CHARS`; only strings are quoted."""
    try:
        text = repr(value) if type(value) is str else str(_without_enums(value))
    except ValueError:  # Python prints no integer of thousands of digits, also not within a list
        return f"{type(value).__name__} with a number of too many digits"
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"{text[:_MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def _without_enums(value: object) -> object:
    """Return the value with the values of enumeration members in place of the members."""
    if isinstance(value, Enum):
        return value.value
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_without_enums, value))  # type: ignore[call-overload,call-arg]
    if isinstance(value, Mapping):
        return {_without_enums(key): _without_enums(item) for key, item in value.items()}
    return value

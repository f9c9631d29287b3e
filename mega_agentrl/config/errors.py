"""The error of an invalid setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_SHOWN_CHARS = 500
"""Length from which a value is abbreviated in a message."""


class ConfigError(ValueError):
    """A setting has a value with which the run cannot start.

    The message is one line: `key=got: expected ...; probable cause: ...; these values fit: ...`.
    """

    def __init__(
        self,
        key: str,
        got: object,
        expected: str,
        cause: str = "",
        solution: Mapping[str, object] | None = None,
    ) -> None:
        """Create the error.

        Args:
            key: dotted key of the setting.
            got: value of the setting.
            expected: what the value should be, with the settings that this depends on.
            cause: probable cause; empty if the value alone explains the error.
            solution: values by dotted key with which the condition holds, if they are known.
        """
        super().__init__(key, got, expected, cause, solution)
        self.key = key
        self.got = got
        self.expected = expected
        self.cause = cause
        self.solution = dict(solution or {})

    @property
    def problem(self) -> str:
        """The message without the values that fit; quotes strings, but no enumeration members."""
        got = _abbreviate(self.got)
        cause = f"; probable cause: {self.cause}" if self.cause else ""
        return f"{self.key}={got}: expected {self.expected}{cause}"

    @property
    def overrides(self) -> str:
        """The values that fit, as they are written on the command line; empty if unknown."""
        return " ".join(f"{key}={value}" for key, value in self.solution.items())

    def __str__(self) -> str:
        """Return the whole message."""
        return self.problem + (f"; these values fit: {self.overrides}" if self.solution else "")


def check_range(ok: bool, key: str, got: object, expected: str) -> None:
    """Raise a `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, got, expected)


def _abbreviate(value: object) -> str:
    """Return the value as text of at most about `_MAX_SHOWN_CHARS`."""
    try:
        text = repr(value) if type(value) is str else str(value)
    except ValueError:  # Python prints no integer of thousands of digits, also not within a list
        return f"{type(value).__name__} with a number of too many digits"
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"{text[:_MAX_SHOWN_CHARS]}... ({len(text)} characters)"

"""The error of an invalid setting."""

from __future__ import annotations

_MAX_SHOWN_CHARS = 500
"""Length from which a value is abbreviated in a message."""


class ConfigError(ValueError):
    """A setting has a value with which the run cannot start.

    The message is one line: `key=got: expected ...; probable cause: ...`.
    """

    def __init__(self, key: str, got: object, expected: str, cause: str = "") -> None:
        """Create the error.

        Args:
            key: dotted key of the setting.
            got: value of the setting.
            expected: what the value should be, with the settings that this depends on.
            cause: probable cause; empty if the value alone explains the error.
        """
        super().__init__(key, got, expected, cause)
        self.key = key
        self.got = got
        self.expected = expected
        self.cause = cause

    def __str__(self) -> str:
        """Return the message; plain strings are quoted, enumeration members are not."""
        got = _abbreviate(self.got)
        cause = f"; probable cause: {self.cause}" if self.cause else ""
        return f"{self.key}={got}: expected {self.expected}{cause}"


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

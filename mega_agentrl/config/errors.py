"""The error of an invalid setting, and the range checks that raise it."""

from __future__ import annotations


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
        got = repr(self.got) if type(self.got) is str else str(self.got)
        cause = f"; probable cause: {self.cause}" if self.cause else ""
        return f"{self.key}={got}: expected {self.expected}{cause}"


def check_range(ok: bool, key: str, got: object, expected: str) -> None:
    """Raise a `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, got, expected)


def check_minimums(section: object, prefix: str, **minimums: float) -> None:
    """Raise a `ConfigError` for the first setting of a section that is below its minimum.

    Args:
        section: the section.
        prefix: dotted key of the section.
        **minimums: smallest value by name of the setting.
    """
    for name, minimum in minimums.items():
        value = getattr(section, name)
        check_range(value >= minimum, f"{prefix}.{name}", value, f"at least {minimum}")

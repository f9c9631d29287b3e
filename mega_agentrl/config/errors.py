"""The error of an invalid setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError, abbreviate

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConfigError(InputError):
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
        super().__init__(key, got, expected, cause)
        self.args = (key, got, expected, cause, solution)  # what unpickling passes on
        self.key = key
        self.solution = dict(solution or {})

    @property
    def problem(self) -> str:
        """The message without the values that fit; quotes strings, but no enumeration members."""
        got = abbreviate(self.got)
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

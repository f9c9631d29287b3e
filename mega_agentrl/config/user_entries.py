"""Yaml lists of the user's classes: `tool.user_tools_file` and `rollout.interaction_config_file`.

An entry has a `class_name` (see `user_code`; a file is relative to the yaml file), optionally
`config`, the keyword arguments of the class, and `extra_keys` of the caller. Every error is a
`ConfigError` whose key has the file, the number of the entry and the key in it.
"""

from __future__ import annotations

import inspect
import os.path
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.input_files import read_yaml
from mega_agentrl.config.peer_names import describe_class
from mega_agentrl.config.ranges import MAX_STEPS, MAX_TIMEOUT_S, FieldType, Range
from mega_agentrl.config.user_code import load_user_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEntry:
    """An entry of the list."""

    key: str
    """`tool.user_tools_file=FILE, entry 1`, for errors."""
    values: dict[str, Any]
    """The entry itself, without unknown keys."""
    folder: Path
    """Folder of the yaml file."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        arguments: dict[str, Any] = self.values.get("config") or {}
        return arguments

    def load(self, expected: str) -> Any:
        """Return the object that `class_name` names; `expected` describes it in errors."""
        name = self.values["class_name"]
        return load_user_object(name, f"{self.key}, class_name", expected, folder=self.folder)

    def construct(self, user_class: Any, base: type[Any], expected: str) -> Any:
        """Return an object of the loaded class, which must be a complete subclass of `base`."""
        key, name = f"{self.key}, class_name", self.values["class_name"]
        if not (isinstance(user_class, type) and issubclass(user_class, base)):
            bases = getattr(user_class, "__mro__", ())
            names = " ".join(f"{one.__module__}.{one.__qualname__}" for one in bases)
            known = describe_class(names)
            cause = f"got {user_class!r}" + (f"; {known}" if known else "")
            raise ConfigError(key, name, expected, cause)
        if inspect.isabstract(user_class):
            missing = sorted(vars(user_class)["__abstractmethods__"])
            raise ConfigError(
                key, name, expected, f"{user_class.__name__} lacks the methods {missing}"
            )
        try:
            inspect.signature(user_class).bind(**self.arguments)
            return user_class(**self.arguments)
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"{self.key}, config",
                self.arguments,
                f"arguments with which {user_class.__name__} can be created",
                f"{type(error).__name__}: {error}",
            ) from error

    def limit(self, name: str, *, is_whole: bool = False) -> Any:
        """Return the count or timeout `name`, above 0; None if the entry does not have it."""
        if name not in self.values:
            return None
        value = self.values[name]
        bounds = Range(above=0, at_most=MAX_STEPS if is_whole else MAX_TIMEOUT_S)
        kind = FieldType(kind=int if is_whole else float, bounds=bounds)
        kind.check(value, f"{self.key}, {name}")
        return value


def read_user_entries(
    path: Path, key: str, extra_keys: Sequence[str], *, head: str = ""
) -> list[UserEntry]:
    """Return the entries of a yaml file in order.

    Args:
        path: The file.
        key: Dotted key of the setting that names it.
        extra_keys: Keys that an entry may have beside `class_name` and `config`.
        head: Key under which a file may also have the list.
    """
    known = ("class_name", "config", *extra_keys)
    user_entries = []
    for number, values in enumerate(_read_list(path, key, head), start=1):
        where = f"{key}={path}, entry {number}"
        is_complete = isinstance(values, dict) and isinstance(values.get("class_name"), str)
        check_range(is_complete, where, values, "a mapping with class_name")
        unknown = sorted(set(map(str, values)) - set(known))
        check_range(not unknown, f"{where}, keys", unknown, f"only {', '.join(known)}")
        check_range(
            isinstance(values.get("config") or {}, dict),
            f"{where}, config",
            values.get("config"),
            "a mapping",
        )
        user_entries.append(UserEntry(key=where, values=values, folder=path.parent))
    return user_entries


def _read_list(path: Path, key: str, head: str) -> list[Any]:
    expected = "a non-empty yaml list of entries"
    if not os.path.isfile(path):
        raise ConfigError(key, path, expected, "there is no such file")
    entries = read_yaml(path, key, expected)
    if isinstance(entries, dict) and set(entries) == {head}:
        entries = entries[head]
    if not isinstance(entries, list) or not entries:
        kind = type(entries).__name__
        raise ConfigError(
            key, path, expected, f"got {kind}; the dash before class_name may be missing"
        )
    return entries

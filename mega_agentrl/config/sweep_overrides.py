"""Overrides of a sweep: which keys have several values, and the folder names of its jobs."""

from __future__ import annotations

import re
from numbers import Real
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hydra.core.override_parser.types import Override

_NO_KEYS = "defaults"
"""Name of a job without swept keys."""


def without_swept(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have one value."""
    return [str(item.input_line) for item in _parse(overrides) if not item.is_sweep_override()]


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys and config groups that have several values, in order."""
    return [str(item.key_or_group) for item in _parse(overrides) if item.is_sweep_override()]


def sweep_dir_name(overrides: Sequence[str], keys: Sequence[str], limit: int = 80) -> str:
    """Return a folder name from the values that a job of a sweep has for the swept keys.

    The option of a config group stands alone if no other group is swept; a number follows the last
    part of its key: `arpo-seed1-lr1e-06`. The names have letters, digits and `._+-` only, so that
    they need no quotes in a shell, an override or a URL. Jobs may have equal names, because the
    number of the job precedes them.

    Args:
        overrides: the overrides of the job, each with one value.
        keys: the swept keys; without any the name is `defaults`.
        limit: maximum number of characters.
    """
    swept = {str(item.key_or_group): item.value() for item in _parse(overrides)}
    swept = {key: value for key, value in swept.items() if key in keys}
    groups = [key for key, value in swept.items() if _is_group(key, value)]
    parts = []
    for key, value in swept.items():
        label, word = _shortest_unique(key, swept), _format_word(value)
        if [key] == groups:
            parts.append(word)
        else:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            parts.append(f"{label}{'' if is_number else '_'}{word}")
    return "-".join(part for part in parts if part)[:limit].rstrip("._+-") or _NO_KEYS


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    return parsed


def _is_group(key: str, value: Any) -> bool:
    """Whether the override selects an option of a config group: those keys have no dot."""
    return "." not in key and isinstance(value, str)


def _shortest_unique(key: str, keys: Iterable[str]) -> str:
    """Return the last part of a dotted key, or as many parts as no other key ends with."""
    parts = re.split(r"[./]", key)
    others = [re.split(r"[./]", other) for other in keys if other != key]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in others):
            return "_".join(parts[-length:])
    return "_".join(parts)


def _format_word(value: Any) -> str:
    """Return a value in letters, digits and `._+-`; a path is shortened to its last part."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "_".join(map(_format_word, value))
    text = str(value).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_")

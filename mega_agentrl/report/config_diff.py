"""Which settings of a run differ from the defaults of the schema.

Both sides are flattened to dotted keys. A run of another version may have keys that the schema
no longer has; they are listed with no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mega_agentrl.config.schema import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

ABSENT = "(not in this version)"


@dataclass(slots=True, kw_only=True, frozen=True)
class Difference:
    """A key with its default and the value of the run, both as text."""

    key: str
    default: str
    value: str


def read_config(path: Path) -> dict[str, Any]:
    """Dotted keys of a run's `config.yaml`; empty where there is no file.

    Raises `ValueError` for a file that is no mapping.
    """
    if not path.is_file():
        return {}
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(
            f"{path}: got {type(loaded).__name__} without a key, expected a run's configuration"
        )
    return flattened(loaded)


def default_config() -> dict[str, Any]:
    """Dotted keys of the schema with their defaults."""
    container = OmegaConf.to_container(OmegaConf.structured(TrainConfig), enum_to_str=True)
    assert isinstance(container, dict)
    return flattened(container)


def differences(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Difference]:
    """What the run set, in the order of its file."""
    return [
        Difference(key=key, default=shown(defaults.get(key, ABSENT)), value=shown(value))
        for key, value in config.items()
        if key not in defaults or shown(defaults[key]) != shown(value)
    ]


def flattened(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{name}.")
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    """A setting as yaml would have it, near enough for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if value != "" else "''"

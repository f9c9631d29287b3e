"""Compare the settings of a run with the defaults of the schema.

Both sides are flattened to dotted keys. Keys that the schema lacks, because the run is of another
version, are listed without a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mega_agentrl.config.algorithm_traits import BRANCHING_RULES, ESTIMATORS, LOSSES
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_yaml, reading
from mega_agentrl.config.override_keys import known_sections
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

NO_DEFAULT = "(not in this version)"
UNSET = "(unset)"
"""The default of an entry of a dictionary, such as an option of a loss."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ConfigDifference:
    """A key whose value differs from the default, with both values as text."""

    key: str
    default: str
    value: str


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's `config.yaml` as values by dotted key; empty if there is no file.

    Raises:
        ValueError: the file is not yaml, or not a mapping.
    """
    if not path.is_file():
        return {}
    expected = "a run's configuration"
    read_yaml(path, str(path), expected)  # bounds its size, for it may be anybody's
    with reading(str(path), path, expected):
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(loaded, dict) or not loaded:
        got = f"{type(loaded).__name__} without a key"
        raise InputError(str(path), got, expected)
    return flatten_config(loaded)


def schema_defaults() -> dict[str, Any]:
    """Return the defaults of the schema by dotted key."""
    return flatten_config(_nested_defaults())


@cache
def _nested_defaults() -> Mapping[Any, Any]:
    container = OmegaConf.to_container(OmegaConf.structured(TrainConfig), enum_to_str=True)
    assert isinstance(container, dict)
    return container


def complete_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with the defaults that they leave out.

    These are keys that a configuration of an earlier version lacks, and the options of the
    advantage estimator, the loss and the branching rule.
    """
    complete = _fill(_nested_defaults(), settings, "")
    for setting in (ESTIMATORS, LOSSES, BRANCHING_RULES):
        section, _, key = setting.key.rpartition(".")
        options_key = setting.options_key.rpartition(".")[2]
        try:
            declared = setting.find(str(complete[section][key])).options
        except ConfigError:  # the user's file is gone
            continue
        given = complete[section][options_key]
        options = {name: option.default for name, option in declared.items()}
        complete[section] = complete[section] | {options_key: options | given}
    return complete


def _fill(defaults: Mapping[Any, Any], given: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    filled = {}
    for key in (*defaults, *(key for key in given if key not in defaults)):
        name, value = f"{prefix}{key}", given.get(key, defaults.get(key))
        if name in known_sections() and isinstance(value, Mapping):
            value = _fill(defaults[key], value, f"{name}.")
        filled[key] = value
    return filled


def diff_configs(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the settings that differ from the defaults, in the order of the file."""
    return [
        ConfigDifference(key=key, default=_default_text(key, defaults), value=format_value(value))
        for key, value in config.items()
        if key not in defaults or format_value(defaults[key]) != format_value(value)
    ]


def _default_text(key: str, defaults: Mapping[str, Any]) -> str:
    if key in defaults:
        return format_value(defaults[key])
    return UNSET if any(key.startswith(f"{name}.") for name in defaults) else NO_DEFAULT


def flatten_config(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, joining keys with dots."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            values |= flatten_config(value, f"{name}.")
        else:
            values[name] = value
    return values


def format_value(value: Any) -> str:
    """Format a setting approximately as yaml."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if value != "" else "''"

"""Register the schema with Hydra, and check keys before Hydra composes a configuration.

The keys are those of command-line overrides and yaml files. A misspelt schema key, config group or
option fails with the nearest known name, instead of Hydra's advice to append it. Types and ranges
of values are checked by Hydra and the schema.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import yaml
from hydra._internal.utils import get_args_parser  # private; checked with Hydra 1.3
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from mega_agentrl.config.algorithm_traits import BRANCHING_RULES, ESTIMATORS, LOSSES
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sweep_overrides import sweep_dir_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hydra.core.override_parser.types import Override

_CODE_SETTINGS = (ESTIMATORS, LOSSES, BRANCHING_RULES)
_HYDRA = "hydra"
_MAX_SHOWN_CHARS = 500
_GLOBAL_PACKAGE = "# @package _global_"
_field_types = cache(get_type_hints)  # uncached, evaluating the annotations takes seconds


def register_schema() -> None:
    """Register the schema and the resolver of `configs/train.yaml` with Hydra.

    Options of estimators, losses and branching rules are the only dictionaries to which an override
    adds an entry without a `+`: `algo.loss_options.clip_high=0.28`.
    """
    schema = OmegaConf.structured(TrainConfig)
    for setting in _CODE_SETTINGS:
        OmegaConf.set_struct(OmegaConf.select(schema, setting.options_key), False)
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("sweep_dir_name", sweep_dir_name, replace=True)


def known_options() -> set[str]:
    """Return the dotted keys of the options of all registered estimators and losses."""
    return {
        f"{setting.options_key}.{option}"
        for setting in _CODE_SETTINGS
        for declaration in setting.registered().values()
        for option in declaration.options
    }


def known_keys(schema: type = TrainConfig) -> dict[str, Any]:
    """Return the type of every leaf by dotted key, in the order of the schema."""
    found: dict[str, Any] = {}
    for name, kind in _field_types(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            found |= {f"{name}.{key}": leaf for key, leaf in known_keys(kind).items()}
        else:
            found[name] = kind
    return found


def known_sections(schema: type = TrainConfig) -> set[str]:
    """Return the dotted keys of the sections: `rollout`, `rollout.branch`, ..."""
    parents: set[str] = set()
    for key in known_keys(schema):
        parts = key.split(".")[:-1]
        parents |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return parents


def is_known(key: str) -> bool:
    """Whether a dotted key is a section, a leaf, or an entry of a dictionary leaf."""
    return key in known_sections() or _leaf_type(key) is not None


def _leaf_type(key: str) -> Any | None:
    """Return the type of a leaf or of an entry of a dictionary leaf; None for other keys."""
    keys = known_keys()
    if key in keys:
        return keys[key]
    parent, dot, _ = key.rpartition(".")
    above = _leaf_type(parent) if dot else None
    return get_args(above)[1] if get_origin(above) is dict else None


def known_groups(config_dir: Path) -> dict[str, list[str]]:
    """Return the options by config group, a folder below `config_dir` (`a/b` if nested)."""
    groups: dict[str, list[str]] = {}
    for path in sorted(config_dir.rglob("*.yaml")):
        group = path.parent.relative_to(config_dir).as_posix()
        if group != ".":
            groups.setdefault(group, []).append(path.stem)
    return groups


def nearest_name(name: str, names: Iterable[str] | None = None) -> str:
    """Return the most similar of `names`, by default of all schema keys and sections.

    Names with the same last part come first: `optm.kl_coef` is nearest to `algo.kl_coef`.
    """
    pool = sorted(names if names is not None else {*known_keys(), *known_sections()})
    close = get_close_matches(name, _with_same_leaf(name, pool) or pool, n=1, cutoff=0.0)
    return close[0] if close else ""


def _with_same_leaf(name: str, names: Iterable[str]) -> list[str]:
    leaf = name.rsplit(".", maxsplit=1)[-1]
    return [known for known in names if known.rsplit(".", maxsplit=1)[-1] == leaf]


def _suggest_names(name: str, names: Iterable[str]) -> str:
    """Return `'a.b'`, or `'a.b' or 'c.b'` for all names with the same last part."""
    pool = sorted(names)
    return " or ".join(map(repr, _with_same_leaf(name, pool) or [nearest_name(name, pool)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The arguments of `python -m mega_agentrl`, which are Hydra's."""

    overrides: list[str]
    """Overrides, or with `--help` the names to explain."""
    config_dirs: list[Path]
    """Folder of `--config-dir`, if it is given."""
    asks_help: bool
    is_sweep: bool
    starts_run: bool
    """Whether a run or a sweep starts; otherwise Hydra prints something and ends."""


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Return the arguments of `sys.argv[1:]` by meaning.

    Exits with Hydra's usage text for an unknown flag.
    """
    parsed = get_args_parser().parse_args(list(arguments))
    return CommandLine(
        overrides=list(parsed.overrides),
        config_dirs=[Path(parsed.config_dir)] if parsed.config_dir else [],
        asks_help=parsed.help,
        is_sweep=parsed.multirun,
        starts_run=not (
            parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion
        ),
    )


def check_overrides(overrides: Sequence[str], *config_dirs: Path) -> None:
    """Raise a `ValueError` for the first Hydra override with an unknown key or option.

    Hydra's own keys (`hydra.*`, `hydra/*`) are not checked.

    Args:
        overrides: `a.b=c`, `+a=c`, `++a=c`, `~a`, `group=option` or `group@package=option`.
        config_dirs: folders with config groups.
    """
    parsed = [_parse_override(text) for text in overrides]
    groups: dict[str, list[str]] = {}
    for folder in config_dirs:
        for group, options in known_groups(folder).items():
            groups[group] = sorted({*groups.get(group, []), *options})
    for override in parsed:
        _check_override(override, groups)
    _check_single_choices(parsed, groups)


def _check_single_choices(overrides: Iterable[Override], groups: Mapping[str, list[str]]) -> None:
    """Check that no config group is chosen twice, for which Hydra's error gives no cause."""
    chosen: dict[tuple[str, str | None], Override] = {}
    for override in overrides:
        group = str(override.key_or_group)
        if group not in groups or override.is_delete() or isinstance(override.value(), dict):
            continue
        first = chosen.setdefault((group, override.package), override)
        if first is not override:
            raise ValueError(
                f"override {override.input_line!r}: the config group {group} is already chosen by "
                f"{first.input_line!r}, expected one choice; probable cause: a script that has one "
                "of them"
            )


def _parse_override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except (OverrideParseException, ValueError, RecursionError) as error:
        raise ValueError(
            f"override {text[:_MAX_SHOWN_CHARS]!r}: expected key=value, group=option or ~key; "
            "probable cause: a value with spaces, commas or brackets that the shell or Hydra "
            "splits (quote it: 'key=\"a, b\"'), or a value that is too long"
        ) from error


def _check_integers(value: Any, key: str) -> None:
    """Refuse integers that OmegaConf cannot convert to a float, with an `OverflowError`."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(key, value, "a number of at most 64 bits")
    for item in value if isinstance(value, list) else ():
        _check_integers(item, key)
    for name, item in value.items() if isinstance(value, dict) else ():
        _check_integers(item, f"{key}.{name}")


def _check_override(override: Override, groups: Mapping[str, list[str]]) -> None:
    key, shown = str(override.key_or_group), f"override {override.input_line!r}"
    if key.split(".")[0].split("/")[0] == _HYDRA:
        return
    keys, sections = known_keys(), known_sections()
    value = override.value()
    _check_integers(value, key)
    if key in groups and not isinstance(value, dict):
        _check_options(override, key, groups[key])
    elif key in sections and isinstance(value, dict):
        for name in _nested_keys(value, key):
            if not is_known(name):
                raise ValueError(
                    f"{shown}: unknown key {name!r}; nearest known is {_suggest_names(name, keys)}"
                )
    elif key in sections and not override.is_delete():
        inside = ", ".join(name for name in keys if name.startswith(f"{key}."))
        raise ValueError(f"{shown}: {key} is a section; set one of its keys: {inside}")
    elif not is_known(key):
        near = _suggest_names(key, {*keys, *groups, *sections, *known_options()})
        raise ValueError(f"{shown}: unknown key {key!r}; nearest known is {near}")


def _check_options(override: Override, group: str, known: Sequence[str]) -> None:
    for option in _chosen_options(override):
        if option not in known:
            raise ValueError(
                f"override {override.input_line!r}: {option!r} is not an option of group {group}; "
                f"nearest is {nearest_name(option, known)!r}, known are {', '.join(known)}"
            )


def _chosen_options(override: Override) -> Iterator[str]:
    """Yield the options that a group override selects: several in a sweep, none for `~group`."""
    value = override.value()
    if override.is_sweep_override():
        yield from (str(item) for item in getattr(value, "list", None) or [])
    elif isinstance(value, list):
        yield from (str(item) for item in value)
    elif value is not None:
        yield str(value)


def check_yaml_keys(config_dir: Path) -> None:
    """Raise a `ValueError` for the first yaml file that sets an unknown key."""
    known = {*known_keys(), *known_sections(), *known_options()}
    for path, key in yaml_keys(config_dir):
        if not is_known(key) and key.split(".")[0] != _HYDRA:
            raise ValueError(
                f"{path}: unknown key {key!r}; nearest known is {_suggest_names(key, known)}"
            )


def yaml_keys(config_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield each yaml file with each dotted key that it sets, sections included."""
    for path in sorted(config_dir.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        group = path.parent.relative_to(config_dir).as_posix()
        package = "" if group == "." or _GLOBAL_PACKAGE in text else group.replace("/", ".")
        for key in _nested_keys(yaml.safe_load(text) or {}, package):
            yield path, key


def _nested_keys(values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if name == "defaults":
            continue
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key
        if isinstance(value, dict) and key.split(".")[0] != _HYDRA:
            yield from _nested_keys(value, key)

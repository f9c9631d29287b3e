"""Register the schema with Hydra, check keys, and compose a configuration.

The keys are those of command-line overrides and yaml files. A misspelt schema key, config group or
option fails with the nearest known name, instead of Hydra's advice to append it. Hydra checks the
types of values, and its errors get key and range from the schema; the schema checks the ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # private; checked with Hydra 1.3
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mega_agentrl.config.algorithm_traits import BRANCHING_RULES, ESTIMATORS, LOSSES
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_yaml
from mega_agentrl.config.peer_names import describe_key
from mega_agentrl.config.ranges import FieldType, setting_types
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sweep_overrides import sweep_dir_name
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hydra.core.override_parser.types import Override

_CODE_SETTINGS = (ESTIMATORS, LOSSES, BRANCHING_RULES)
_HYDRA = "hydra"
_OPEN_KEYS = ("rollout.agent", "model.megatron", "optim.megatron", "engine.vllm")
"""Settings whose entries may have entries at any depth."""
_RUBRIC_KEY = "reward.rubric"
_GLOBAL_PACKAGE = "# @package _global_"
_field_types = cache(get_type_hints)  # uncached, evaluating the annotations takes seconds


@cache
def register_schema() -> None:
    """Register the schema and the resolver of `configs/train.yaml` with Hydra, once per process.

    Options of estimators, losses and branching rules, arguments of the user's agent and fields of
    Megatron-core and vLLM are the only dictionaries to which an override adds an entry without a
    `+`: `algo.loss_options.clip_high=0.28`.
    """
    schema = OmegaConf.structured(TrainConfig)
    for key in (*(setting.options_key for setting in _CODE_SETTINGS), *_OPEN_KEYS):
        OmegaConf.set_struct(OmegaConf.select(schema, key), False)
    # OmegaConf refuses the whole numbers that a yaml file adds to a mapping of mappings of floats.
    # The schema checks the values.
    rubric = schema.reward._get_node("rubric")  # private; checked with OmegaConf 2.3
    rubric._metadata.ref_type, rubric._metadata.element_type = dict[str, Any], Any
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("sweep_dir_name", sweep_dir_name, replace=True)


@cache
def known_options() -> frozenset[str]:
    """Return the dotted keys of the options of all registered estimators and losses."""
    return frozenset(
        f"{setting.options_key}.{option}"
        for setting in _CODE_SETTINGS
        for declaration in setting.registered().values()
        for option in declaration.options
    )


@cache
def known_keys(schema: type = TrainConfig) -> Mapping[str, Any]:
    """Return the type of every leaf by dotted key, in the order of the schema."""
    leaf_types: dict[str, Any] = {}
    for name, kind in _field_types(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            leaf_types |= {f"{name}.{key}": leaf for key, leaf in known_keys(kind).items()}
        else:
            leaf_types[name] = kind
    return leaf_types


@cache
def known_sections(schema: type = TrainConfig) -> frozenset[str]:
    """Return the dotted keys of the sections: `rollout`, `rollout.branch`, ..."""
    parents: set[str] = set()
    for key in known_keys(schema):
        parts = key.split(".")[:-1]
        parents |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return frozenset(parents)


def is_known(key: str) -> bool:
    """Whether a dotted key is a section, a leaf, or an entry of a dictionary leaf."""
    return key in known_sections() or setting_type(key) is not None


def setting_type(key: str) -> FieldType | None:
    """Return the type of a leaf or of an entry of a dictionary leaf; None for other keys."""
    section: type = TrainConfig
    kind: FieldType | None = None
    for name in key.split("."):
        if kind is not None:
            if kind.kind is not Any or not key.startswith(tuple(f"{one}." for one in _OPEN_KEYS)):
                kind = kind.item if kind.kind is dict else None
        elif is_dataclass(hint := _field_types(section).get(name)) and isinstance(hint, type):
            section = hint
            continue
        else:
            kind = setting_types(section).get(name)
        if kind is None:
            return None
    return kind


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
    """The arguments of `python -m mega_agentrl`, as Hydra parses them."""

    overrides: list[str]
    """Overrides, or with `--help` the names to explain."""
    config_dirs: list[Path]
    """Folder of `--config-dir`, if it is given."""
    asks_help: bool
    is_sweep: bool
    starts_run: bool
    """Whether a run or a sweep starts; otherwise Hydra prints something and ends."""


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse `sys.argv[1:]`.

    Exits with Hydra's usage text for an unknown flag.

    Raises:
        InputError: A flag is one of another trainer.
    """
    parser = get_args_parser()
    parsed, unknown = parser.parse_known_args(list(arguments))
    for flag in unknown:
        if cause := describe_key(flag):
            raise InputError("command line", flag, "key=value, without dashes", cause)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
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
        config_dirs: folders with config groups. `check_yaml_keys` has checked the first; in the
            others only the chosen files are checked.
    """
    parsed = [_parse_override(text) for text in overrides]
    groups: dict[str, list[str]] = {}
    for folder in config_dirs:
        for group, options in known_groups(folder).items():
            groups[group] = sorted({*groups.get(group, []), *options})
    for override in parsed:
        _check_override(override, groups)
        if str(override.key_or_group) in groups:
            _check_chosen_files(override, config_dirs[1:])
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
            raise InputError(
                f"override {override.input_line!r}",
                f"a second choice after {first.input_line!r}",
                f"one choice of the config group {group}",
                "a script that passes one of them",
            )


def _parse_override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except (OverrideParseException, ValueError, RecursionError) as error:
        raise InputError(
            "override",
            text,
            "key=value, group=option or ~key",
            "a value with spaces, commas or brackets that the shell or Hydra splits (quote it: "
            "'key=\"a, b\"'), or a value that is too long",
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
                raise _unknown_key(shown, name, keys)
    elif key in sections and not override.is_delete():
        inside = ", ".join(name for name in keys if name.startswith(f"{key}."))
        raise InputError(shown, "a section", f"one of its keys: {inside}")
    elif not is_known(key):
        raise _unknown_key(shown, key, {*keys, *groups, *sections, *known_options()})


def _unknown_key(name: str, key: str, known: Iterable[str]) -> InputError:
    nearest, described = _suggest_names(key, known), describe_key(key)
    cause = f"a mistyped key, nearest is {nearest}"
    if described:  # a word alone may be either
        cause = described if "." in key else f"{described}; or {cause}"
    return InputError(name, key, "a known key", cause)


def _check_options(override: Override, group: str, known: Sequence[str]) -> None:
    for option in _chosen_options(override):
        if option not in known:
            raise InputError(
                f"override {override.input_line!r}",
                option,
                f"an option of the config group {group}: {', '.join(known)}",
                f"a mistyped name, nearest is {nearest_name(option, known)!r}",
            )


def _check_chosen_files(override: Override, config_dirs: Iterable[Path]) -> None:
    for option in _chosen_options(override):
        for folder in config_dirs:
            path = folder / str(override.key_or_group) / f"{option}.yaml"
            if path.is_file():
                _check_yaml_file(path, folder)


def _chosen_options(override: Override) -> Iterator[str]:
    """Yield the options that a group override selects: several in a sweep, none for `~group`."""
    value = override.value()
    if override.is_sweep_override():
        yield from (str(item) for item in getattr(value, "list", None) or [])
    elif isinstance(value, list):
        yield from (str(item) for item in value)
    elif value is not None:
        yield str(value)


def last_value(overrides: Sequence[str], key: str) -> Any | None:
    """Return the value that overrides give to a key; None if they give none."""
    values = [item.value() for item in map(_parse_override, overrides) if item.key_or_group == key]
    return values[-1] if values else None


def repeated_keys(overrides: Sequence[str]) -> list[str]:
    """Return a sentence for each key that is given twice; as in Hydra the last value holds.

    Scripts that append the user's arguments to their own rely on this.
    """
    last: dict[str, Override] = {}
    sentences = []
    for override in map(_parse_override, overrides):
        key = str(override.key_or_group)
        first = last.get(key)
        last[key] = override
        if first is not None and first.input_line != override.input_line:
            sentences.append(
                f"{key} is given twice: {override.input_line} holds, not {first.input_line}"
            )
    return sentences


def compose_settings(overrides: Sequence[str], config_dir: Path, *other_dirs: Path) -> DictConfig:
    """Compose `train.yaml` with overrides that `check_overrides` has checked.

    Args:
        overrides: Hydra overrides, each with one value.
        config_dir: folder of `train.yaml`.
        other_dirs: folders with further options of config groups.

    Raises:
        ConfigError: a value has another type than the setting.
        HydraException: any other error of Hydra.
    """
    folders = ",".join(f"'file://{folder.resolve()}'" for folder in other_dirs)
    search_path = [f"hydra.searchpath=[{folders}]"] if folders else []
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            composed: DictConfig = compose("train", [*search_path, *overrides])
            replace_rubrics(composed, overrides)
            return composed
    except HydraException as error:
        if (type_error := _type_error(error, overrides)) is not None:
            raise type_error from error
        raise


def replace_rubrics(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Remove the parts that a file gave to a rubric which an override gives as a whole.

    `+reward.rubric.default={mine:1}` means these weights. Hydra would add them to those of the
    files, so that `reward=accuracy` would still count.

    Args:
        composed: the configuration with the overrides; changed in place.
        overrides: the overrides, in order.
    """
    given: dict[str, set[str]] = {}
    for override in map(_parse_override, overrides):
        key, value = str(override.key_or_group), override.value()
        source, _, part = key.removeprefix(f"{_RUBRIC_KEY}.").partition(".")
        if key == _RUBRIC_KEY and isinstance(value, dict):
            given = {str(name): set(map(str, parts or {})) for name, parts in value.items()}
            rubric = composed.reward.rubric
            for name in [name for name in rubric if name not in given]:
                _delete_entry(rubric, name)
        elif key == f"{_RUBRIC_KEY}.{source}" and isinstance(value, dict):
            given[source] = set(map(str, value))
        elif part and source in given:
            given[source].add(part)
    for source, parts in given.items():
        weights = composed.reward.rubric.get(source)
        for name in [name for name in weights or {} if name not in parts]:
            _delete_entry(weights, name)


def _delete_entry(node: DictConfig, name: Any) -> None:
    with open_dict(node):
        del node[name]


def _type_error(error: HydraException, overrides: Sequence[str]) -> ConfigError | None:
    """Return the error for a value that OmegaConf cannot convert, or a new entry without a `+`.

    Returns None for any other error.
    """
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    kind = setting_type(cause.full_key.partition("[")[0])
    if kind is None:
        return None
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        for override in map(_parse_override, overrides):
            key = str(override.key_or_group)
            is_above = isinstance(override.value(), dict) and cause.full_key.startswith(f"{key}.")
            if key == cause.full_key or is_above:
                expected = f"a + before the key of a new entry: '+{override.input_line}'"
                return ConfigError(key, override.value(), expected)
    origin, reason = str(error).splitlines()[0], str(cause).splitlines()[0]
    if origin.startswith("In "):  # the yaml file
        reason = f"{origin.rstrip(':')}: {reason}"
    return ConfigError(cause.full_key, cause.value, kind.expected, reason)


def check_yaml_keys(config_dir: Path) -> None:
    """Raise a `ValueError` for the first yaml file that is damaged or sets an unknown key."""
    for path in sorted(config_dir.rglob("*.yaml")):
        _check_yaml_file(path, config_dir)


def _check_yaml_file(path: Path, config_dir: Path) -> None:
    known = {*known_keys(), *known_sections(), *known_options()}
    for key in file_keys(path, config_dir):
        if not is_known(key) and key.split(".")[0] != _HYDRA:
            raise _unknown_key(str(path), key, known)


def file_keys(path: Path, config_dir: Path) -> Iterator[str]:
    """Yield each dotted key that a yaml file below `config_dir` sets, sections included."""
    expected = "a yaml file of settings"
    values = read_yaml(path, "configuration", expected) or {}
    if not isinstance(values, dict):
        cause = f"it holds a {type(values).__name__}"
        raise ConfigError("configuration", str(path), expected, cause)
    is_global = _GLOBAL_PACKAGE in path.read_text(encoding="utf-8")
    group = path.parent.relative_to(config_dir).as_posix()
    package = "" if group == "." or is_global else group.replace("/", ".")
    for name, value in values.items():
        _check_integers(value, f"{path}, {package}.{name}" if package else f"{path}, {name}")
    yield from _nested_keys(values, package)


def _nested_keys(values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if name == "defaults":
            continue
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key
        # Keys of a dictionary leaf are the user's, and may have dots: `agent.reward`.
        if isinstance(value, dict) and key in known_sections():
            yield from _nested_keys(value, key)

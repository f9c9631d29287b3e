"""The text of `python -m mega_agentrl --help [NAME ...]`.

Without names it lists the usual commands, the experiments, the config groups and the sections of
the schema. With the name of a section, group or key it describes each entry in one line. The text
comes from the docstrings of the schema and the first comment of the yaml files; no configuration is
composed.
"""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from mega_agentrl.config.field_docs import field_docs, first_sentence, format_value, type_name
from mega_agentrl.config.override_keys import known_groups, known_keys, nearest_name
from mega_agentrl.config.ranges import setting_types
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_HEAD = """\
mega_agentrl trains tool-using language-model agents with reinforcement learning.

Usage: python -m mega_agentrl [group=option ...] [key=value ...]

  python -m mega_agentrl experiment=smoke                 the main job on this machine (make smoke)
  python -m mega_agentrl experiment=smoke optim.lr=0      any key can be overridden
  python -m mega_agentrl -m experiment=smoke algo=grpo,arpo seed=1,2,3      a sweep
  python -m mega_agentrl experiment=smoke --cfg job       print the composed configuration and stop
  make preflight ARGS="experiment=NAME key=value ..."     check whether a configuration can run
  make report RUN=FOLDER                                  write the report page of a run
  make compare RUNS="FOLDER ..."                          compare runs and sweeps in a table
  python -m mega_agentrl --help optim rollout.branch      keys of these sections, one line each
  python -m mega_agentrl --help optim.lr                  everything about one key
  python -m mega_agentrl --hydra-help                     flags of Hydra

docs/configuration.md lists all keys; docs/quick_start.md leads to a first run.
"""
_EXPERIMENT = "experiment"


def help_text(names: Sequence[str], *config_dirs: Path) -> str:
    """Return the help on the named sections, config groups and keys, or on all of them.

    Args:
        names: Dotted keys of sections and settings, or names of config groups; empty for the
            overview.
        *config_dirs: The folders with config groups.

    Raises:
        ValueError: A name is none of these.
    """
    groups: dict[str, list[Path]] = {}
    for folder in config_dirs:
        for group, options in known_groups(folder).items():
            files = [folder / group / f"{option}.yaml" for option in options]
            groups.setdefault(group, []).extend(files)
    if not names:
        return "\n".join([_HEAD, *_overview(groups)])
    return "\n".join(part for name in names for part in _topic(name, groups))


def _overview(groups: dict[str, list[Path]]) -> Iterator[str]:
    yield f"Experiments ({_EXPERIMENT}=NAME):"
    yield _table(_options(groups[_EXPERIMENT]))
    yield "Config groups (GROUP=OPTION; --help GROUP describes the options):"
    yield _table(
        (name, ", ".join(file.stem for file in files))
        for name, files in groups.items()
        if name != _EXPERIMENT
    )
    yield "Sections (--help SECTION lists the keys):"
    sections = _sections("", TrainConfig)
    yield _table((path, first_sentence(kind.__doc__ or "")) for path, kind in sections if path)
    yield "Keys of the run itself:"
    yield _table(_keys("", TrainConfig))


def _topic(name: str, groups: dict[str, list[Path]]) -> Iterator[str]:
    sections = dict(_sections("", TrainConfig))
    keys = known_keys()
    name = name.rstrip(".=")
    if name not in {*sections, *groups, *keys} or not name:
        near = nearest_name(name, {*sections, *groups, *keys} - {""})
        expected = "the name of a section, a config group or a key"
        raise InputError("--help", name, expected, f"a mistyped name, nearest is {near}")
    if name in sections:
        yield f"{name}: {inspect.cleandoc(sections[name].__doc__ or '')}\n"
        if rows := list(_keys(name, sections[name])):
            yield _table(rows)
        inner = [path for path in sections if path.startswith(f"{name}.")]
        if inner:
            yield "Sections in it (--help SECTION lists the keys):"
            yield _table((path, first_sentence(sections[path].__doc__ or "")) for path in inner)
    if name in groups:
        yield f"Options of the config group ({name}=OPTION):"
        yield _table(_options(groups[name]))
    if name in keys:
        yield from _key_help(name, keys[name], sections)


def _sections(path: str, section: type) -> Iterator[tuple[str, type]]:
    """Yield the section and all sections below it by dotted key, in the order of the schema."""
    yield path, section
    for name, kind in get_type_hints(section).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _sections(f"{path}.{name}".lstrip("."), kind)


def _keys(path: str, section: type) -> Iterator[tuple[str, str]]:
    """Yield `key=default` and the first sentence about it for every key of a section."""
    docs, defaults = field_docs(section), section()
    for field in dataclasses.fields(section):
        default = getattr(defaults, field.name)
        if not dataclasses.is_dataclass(default):
            key = f"{path}.{field.name}".lstrip(".")
            yield f"{key}={format_value(default)}", first_sentence(docs[field.name])


def _options(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Return the options of a config group, each with the first sentence of its yaml file."""
    return [(file.stem, _first_comment(file)) for file in files]


def _first_comment(file: Path) -> str:
    """Return the first sentence of a file's first comment; indented commands are no part of it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = takewhile(lambda line: line.startswith("#") and line[1:3] != "  ", lines)
    words = [line[1:].strip() for line in comments if not line.startswith("# @package")]
    return first_sentence(" ".join(words)) if words else ""


def _key_help(key: str, kind: Any, sections: dict[str, type]) -> Iterator[str]:
    """Yield everything the schema says about a key: meaning, type, range, default and choices."""
    path, _, name = key.rpartition(".")
    section = sections[path]
    yield f"{key}={format_value(getattr(section(), name))} (the default)\n"
    yield f"{field_docs(section)[name]}\n"
    yield f"Type: {type_name(kind).replace('`', '')}"
    declared_range = setting_types(section)[name].declared_range
    if declared_range:
        yield f"Range: {declared_range}"
    for enum in (kind, *get_args(kind)):
        if isinstance(enum, type) and issubclass(enum, Enum):
            docs = field_docs(enum)
            yield "\nChoices:"
            yield _table((choice.name, docs[choice.name]) for choice in enum)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Return the rows as lines of two columns, the names and their meanings.

    Names of more than 40 characters do not widen the first column.
    """
    rows = list(rows)
    width = max((len(name) for name, _ in rows if len(name) <= 40), default=0)
    return "".join(f"  {name:<{width}}  {text}".rstrip() + "\n" for name, text in rows)

"""The reference of all settings, made from the schema: docs/configuration.md.

    python tools/make_config_reference.py [--check] [--out docs/configuration.md]

A section per dataclass, with its docstring, and a row per setting: type or choices, default, and
the yaml files under `configs/` that set it. `--check` writes nothing and ends with 1 where the
file is not what it would write.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mega_agentrl.config.keys import known_keys  # noqa: E402
from mega_agentrl.config.places import config_folder  # noqa: E402
from mega_agentrl.config.schema import TrainConfig  # noqa: E402

HEAD = """# Settings

Made by `tools/make_config_reference.py` from `mega_agentrl/config`; do not edit. {count} settings,
each read by the code, with its range checked before anything starts. Set them on the command line,
`key=value`, or choose a file of a group, `group=file`; see the [quick start](quick_start.md).
What the choices mean is at the [end](#choices).
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD.format(count=len(known_keys()))]
    users = files_that_set()
    for path, section in sections("", TrainConfig):
        parts.append(f"## `{path}`\n" if path else "## The run\n")
        parts.append(inspect.cleandoc(section.__doc__ or "") + "\n")
        rows = list(settings(path, section, users))
        if rows:
            parts.append("| setting | type | default | set by |\n| --- | --- | --- | --- |")
            parts.append("\n".join(rows) + "\n")
    return "\n".join([*parts, "## Choices\n", *choices()])


def sections(path: str, section: type) -> Iterator[tuple[str, type]]:
    """The section itself and all below it, in the order of the schema."""
    yield path, section
    for name, kind in get_type_hints(section).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from sections(f"{path}.{name}".lstrip("."), kind)


def settings(path: str, section: type, users: Mapping[str, list[str]]) -> Iterator[str]:
    """A row for each setting of a section."""
    kinds = get_type_hints(section)
    defaults = section()
    for field in dataclasses.fields(section):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            continue
        key = f"{path}.{field.name}".lstrip(".")
        cells = (
            f"`{key}`",
            type_name(kind),
            f"`{shown(getattr(defaults, field.name))}`",
            ", ".join(named(users.get(key, []))),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def named(files: list[str]) -> list[str]:
    """The files by name, experiments as a number: there are many."""
    groups = [f"`{file}`" for file in files if not file.startswith("experiment/")]
    number = len(files) - len(groups)
    return groups + ([f"{number} experiment{'s' * (number > 1)}"] if number else [])


def choices() -> Iterator[str]:
    """What each enumeration of the schema says of its names."""
    found = {kind for leaf in known_keys().values() for kind in (leaf, *get_args(leaf))}
    enums = [one for one in found if isinstance(one, type) and issubclass(one, Enum)]
    for one in sorted(enums, key=lambda kind: kind.__name__):
        users = [key for key, leaf in known_keys().items() if one in (leaf, *get_args(leaf))]
        yield f"### {one.__name__}\n"
        yield ", ".join(f"`{key}`" for key in users) + "\n"
        yield inspect.cleandoc(one.__doc__ or "") + "\n"


def type_name(kind: Any) -> str:
    """As a user thinks of it: choices by their names."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.name}`" for choice in kind)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(type_name(one) for one in get_args(kind))
    if origin in (list, tuple):
        return f"list of {type_name(get_args(kind)[0])}"
    if origin is dict:
        return f"names with {type_name(get_args(kind)[1])}"
    return "none" if kind is NoneType else getattr(kind, "__name__", str(kind))


def shown(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list) and any(isinstance(one, Enum) for one in value):
        return f"[{', '.join(shown(one) for one in value)}]"
    return str(value) if value != "" else '""'


def files_that_set() -> dict[str, list[str]]:
    """By key, the yaml files that set it, as `group/file`."""
    found: dict[str, list[str]] = defaultdict(list)
    folder = config_folder()
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        group = path.parent.relative_to(folder).as_posix()
        inside = "" if "@package _global_" in text or group == "." else group
        name = path.relative_to(folder).with_suffix("").as_posix()
        for key in leaves(yaml.safe_load(text) or {}):
            found[f"{inside.replace('/', '.')}.{key}".lstrip(".")].append(name)
    return found


def leaves(tree: Mapping[str, Any]) -> Iterator[str]:
    """Dotted keys of what a yaml file sets."""
    for name, value in tree.items():
        if name in {"defaults", "hydra"}:
            continue
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in leaves(value))
        yield name


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "configuration.md")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    page = reference()
    if not given.check:
        given.out.write_text(page, encoding="utf-8")
        return 0
    there = given.out.read_text(encoding="utf-8") if given.out.exists() else ""
    difference = difflib.unified_diff(there.splitlines(), page.splitlines(), "there", "schema")
    lines = list(difference)
    if lines:
        sys.stderr.write("\n".join(lines[:40]))
        sys.stderr.write(f"\n{given.out} is not current: python {Path(__file__).name}\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

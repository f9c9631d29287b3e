"""Reads docstrings, types and defaults of the schema's settings as text for users.

`--help` (`help_text`) and the reference of all settings (`tools/make_config_reference.py`) show it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring under each field or enumeration member of a class, as one line."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("mega_agentrl."):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        definition = tree.body[0]
        assert isinstance(definition, ast.ClassDef), base
        for node, following in itertools.pairwise(definition.body):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[target.id] = " ".join(str(following.value.value).split())
    return docs


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, or what precedes its first semicolon, on one line."""
    line = " ".join(text.split())
    parts = re.split(r"(?<!Dr)(?<!e\.g)(?<!i\.e)\.\s+(?=[A-Z0-9`(])|;\s", line, maxsplit=1)
    return parts[0].rstrip(".") + "."


def type_name(kind: Any) -> str:
    """Return the name of a type for users; the names of the choices for an enumeration."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.name}`" for choice in kind)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(type_name(member) for member in get_args(kind))
    if origin in (list, tuple):
        return f"list of {type_name(get_args(kind)[0])}"
    if origin is dict:
        value_type = get_args(kind)[1]
        return "names with values" if value_type is Any else f"names with {type_name(value_type)}"
    return "none" if kind is NoneType else getattr(kind, "__name__", str(kind))


def format_value(value: Any) -> str:
    """Return the value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list) and any(isinstance(item, Enum) for item in value):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return str(value) if value != "" else '""'

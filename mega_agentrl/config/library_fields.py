"""Reads the fields of a library's dataclass from its source, and checks values for them.

`model.megatron`, `optim.megatron` and `engine.vllm` are arguments of classes of Megatron-core and
vLLM. They are checked on a login node, or a driver without GPUs, before anything is imported;
importing both libraries would take longer than all other checks together. Therefore the source is
parsed, as that of users' objects is (`config.declarations`).

Names are looked up in the module of the class and followed through its imports within the library.
A value is checked with the types that a yaml file can express: numbers, texts, lists, mappings,
`Literal`s, members of enumerations by name or value, and mappings of the fields of another
dataclass. A field of any other type (a function, a dtype) cannot be set.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mega_agentrl.config.declarations import last_name
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.user_code import find_user_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LISTS = {"list", "List", "tuple", "Tuple", "set", "Set", "Sequence"}
_MAPPINGS = {"dict", "Dict", "Mapping"}
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "Path": (str,),
    **dict.fromkeys(_LISTS, (list,)),
    **dict.fromkeys(_MAPPINGS, (dict,)),
}


class _Import(NamedTuple):
    """A name that a module imports from another."""

    module: str
    name: str


class _Type(NamedTuple):
    """One alternative of a type, and the module in which its names are looked up."""

    node: ast.AST
    module: str

    def accepts(self, value: Any) -> bool:
        """Return whether a value has this type, which is not that of a mapping of fields."""
        node = self.node
        if isinstance(node, ast.Constant):
            return value is node.value
        if isinstance(node, ast.ClassDef):
            members = _enum_members(node)
            return any(_is_same(value, one) for one in (*members, *members.values()))
        if isinstance(node, ast.Name):
            kinds = _PLAIN_TYPES.get(node.id, ())
            is_bool = isinstance(value, bool)
            return node.id == "Any" or (isinstance(value, kinds) and is_bool == (kinds == (bool,)))
        assert isinstance(node, ast.Subscript), "alternatives are of these kinds"
        name, items = last_name(node.value), _arguments(node)
        if name == "Literal":
            return any(_is_same(value, one) for one in self.literals())
        if name in _LISTS and isinstance(value, list):
            return all(self._accepts_item(items, one) for one in value)
        if name in _MAPPINGS and isinstance(value, dict):
            return all(self._accepts_item(items[1:], one) for one in value.values())
        return False

    def literals(self) -> list[Any]:
        """Return the values of a `Literal`, which may contain others by name."""
        assert isinstance(self.node, ast.Subscript)
        found: list[Any] = []
        for item in _arguments(self.node):
            if isinstance(item, ast.Constant):
                found.append(item.value)
                continue
            for kind in _alternatives(item, self.module):
                found += kind.literals()
        return found

    def describe(self) -> str:
        """Return the values for an error; empty if no value of a configuration has this type."""
        node = self.node
        if isinstance(node, ast.Constant):
            return "null"
        if isinstance(node, ast.ClassDef):
            members = ", ".join(_enum_members(node))
            return f"one of {members}" if members else f"a mapping of fields of {node.name}"
        if isinstance(node, ast.Name):
            return node.id if node.id in _PLAIN_TYPES or node.id == "Any" else ""
        assert isinstance(node, ast.Subscript)
        name = last_name(node.value)
        if name == "Literal":
            return f"one of {', '.join(map(str, self.literals()))}"
        return ast.unparse(node) if name in _LISTS | _MAPPINGS else ""

    def _accepts_item(self, items: list[ast.expr], value: Any) -> bool:
        kinds = [kind for item in items for kind in _alternatives(item, self.module)]
        return any(kind.accepts(value) for kind in kinds)


def check_fields(values: Mapping[str, Any], key: str, source: str) -> None:
    """Raise a `ConfigError` for the first value that is for no field, or of another type.

    Nothing is checked if the library is not installed; the class then refuses what it does not
    have.

    Args:
        values: Values by field.
        key: Dotted key of the values, for errors.
        source: The class, as `package.module:Class`.
    """
    module, _, name = source.partition(":")
    found = _find(name, module)
    if found is not None and isinstance(found.node, ast.ClassDef):
        _check_class(values, key, found.node, found.module)


def _check_class(values: Mapping[str, Any], key: str, node: ast.ClassDef, module: str) -> None:
    fields = _fields(node, module)
    for name, value in values.items():
        full_key = f"{key}.{name}"
        if name not in fields:
            near = get_close_matches(str(name), fields, n=1, cutoff=0.0)
            cause = f"a mistyped name, the nearest is {near[0]}" if near else ""
            raise ConfigError(full_key, value, f"a field of {module}.{node.name}", cause)
        _check_value(value, full_key, list(_alternatives(*fields[name])))


def _check_value(value: Any, key: str, kinds: list[_Type]) -> None:
    """Raise a `ConfigError` unless a value has one of these types."""
    if any(kind.accepts(value) for kind in kinds):
        return
    for node, module in kinds:
        if isinstance(value, dict) and isinstance(node, ast.ClassDef) and not _enum_members(node):
            _check_class(value, key, node, module)
            return
    expected = " or ".join(filter(None, (kind.describe() for kind in kinds)))
    check_range(False, key, value, expected or "no value, because yaml has none of its type")


def _fields(node: ast.ClassDef, module: str) -> dict[str, tuple[ast.expr, str]]:
    """Return the annotation of each public field of a dataclass, and the module that has it."""
    fields: dict[str, tuple[ast.expr, str]] = {}
    for base in node.bases:
        found = _find(last_name(base), module)
        if found is not None and isinstance(found.node, ast.ClassDef):
            fields |= _fields(found.node, found.module)
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        is_argument = "init=False" not in ast.unparse(statement)
        name, annotation = statement.target.id, statement.annotation
        if is_argument and name[0] != "_" and not ast.unparse(annotation).startswith("ClassVar"):
            fields[name] = (annotation, module)
    return fields


def _alternatives(node: ast.AST, module: str) -> Iterator[_Type]:
    """Yield the members of a union, with aliases and enclosing annotations resolved."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _alternatives(ast.parse(node.value, mode="eval").body, module)
    elif isinstance(node, ast.BinOp):
        yield from _alternatives(node.left, module)
        yield from _alternatives(node.right, module)
    elif isinstance(node, ast.Subscript) and last_name(node.value) in ("Union", "Optional"):
        for item in _arguments(node):
            yield from _alternatives(item, module)
        if last_name(node.value) == "Optional":
            yield _Type(ast.Constant(value=None), module)
    elif isinstance(node, ast.Subscript) and last_name(node.value) == "Annotated":
        yield from _alternatives(_arguments(node)[0], module)
    elif isinstance(node, ast.Name) and (found := _find(node.id, module)) is not None:
        if isinstance(found.node, ast.ClassDef):
            yield found
        else:
            yield from _alternatives(found.node, found.module)
    elif isinstance(node, ast.Constant | ast.Name | ast.Subscript):
        yield _Type(node, module)


def _enum_members(node: ast.ClassDef) -> dict[str, Any]:
    """Return the value of each member of an enumeration, else its name; empty for a class."""
    if not any(last_name(base).endswith("Enum") for base in node.bases):
        return {}
    return {
        statement.targets[0].id: getattr(statement.value, "value", statement.targets[0].id)
        for statement in node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }


def _is_same(value: Any, literal: Any) -> bool:
    """Return whether values are equal and of one type; True equals 1 otherwise."""
    return type(value) is type(literal) and bool(value == literal)


def _find(name: str, module: str) -> _Type | None:
    """Return the class or alias that a name stands for; None for a name of another library."""
    library = module.partition(".")[0]
    while module.partition(".")[0] == library:
        try:
            found = _definitions(module).get(name)
        except (ImportError, FileNotFoundError):  # not installed, or no Python file
            return None
        if found is None:
            return None
        if not isinstance(found, _Import):
            return _Type(found, module)
        module, name = found
    return None


@cache
def _definitions(module: str) -> dict[str, ast.AST | _Import]:
    """Return classes, aliases of types and imports of a module by name."""
    file, _ = find_user_source(module, "")
    tree = ast.parse(Path(file).read_text(encoding="utf-8"), str(file))
    package = module.split(".")[: None if file.name == "__init__.py" else -1]
    found: dict[str, ast.AST | _Import] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for one in node.names:
                found[one.asname or one.name] = _Import(source, one.name)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


def _arguments(node: ast.Subscript) -> list[ast.expr]:
    """Return the arguments of a generic type."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]

"""Reads traits and options of estimators, losses and branching rules from their source.

An estimator or a loss needs torch, and a user's file may need anything, but a configuration is
checked on a login node before any of it is imported. Therefore the checks parse the file and read
the definition of the function or class, which is at the top level:

* Traits are the keyword arguments of its decorator, which are literals:
  `@register_advantage("remax", needs_greedy_baseline=True)`.
* Options are the keyword-only arguments of a function, or the fields of a dataclass. The default is
  a literal. A type and a range are optional; with them, values are checked:
  `*, tau: Annotated[float, Range(above=0)] = 0.3`.
* The positional arguments must be those that it will be called with.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.peer_names import describe_class
from mega_agentrl.config.ranges import Range
from mega_agentrl.config.user_code import find_user_source, is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Definition = ast.FunctionDef | ast.ClassDef
TraitsT = TypeVar("TraitsT")

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_CHECKED_TYPES = {"float", "int", "bool", "str", "None"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of an algorithm."""

    name: str
    default: Any
    types: tuple[str, ...] = ()
    """Names of the types of its values: float, int, bool, str or None; empty if the annotation has
    others, with which values are not checked."""
    bounds: Range = field(default_factory=Range)
    """Range of its values that are numbers."""
    doc: str = ""
    """Its description in the docstring."""

    def accepts(self, value: Any) -> bool:
        """Return whether the value has one of the types and is in the range."""
        if not self.types:
            return True
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_of_type = "float" in self.types or ("int" in self.types and isinstance(value, int))
            return is_of_type and value in self.bounds
        return ("None" if value is None else type(value).__name__) in self.types

    @property
    def expected(self) -> str:
        """Description of its values, such as `float or null, above 1`."""
        types = ["null" if name == "None" else name for name in self.types]
        parts = (" or ".join(types), str(self.bounds))
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Traits and options that a function or a class declares."""

    name: str
    """Name that it is registered with, or else its own."""
    summary: str = ""
    """First line of its docstring."""
    traits: Mapping[str, Any]
    """Keyword arguments of its decorator."""
    options: Mapping[str, Option]
    """Its options by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSetting:
    """A setting that names a function or class: a registered one, or one in a user's own file."""

    key: str
    """Dotted key of the setting."""
    options_key: str
    """Dotted key of the setting with the values of the options."""
    expected: str
    """Description of the user's object, for errors."""
    default_name: str
    """Name of the user's object if the value of the setting has none."""
    arguments: tuple[str, ...]
    """Positional arguments that the function, or `method` of the class, is called with."""
    method: str = ""
    """Method of the class; empty if the object is a function."""
    base: str = ""
    """Abstract base of the class, which does not define the method."""
    decorator: str = ""
    """Decorator that registers the objects; empty if it declares nothing."""
    needs_decorator: bool = False
    """Whether a user's object must have the decorator."""
    source: str = ""
    """File of the package with the registered objects, or folder of such files; empty if these have
    no options."""

    def registered(self) -> Mapping[str, Declaration]:
        """Return the declarations of the package's own objects by registered name."""
        return _read_registered(_PACKAGE_DIR / self.source, self.decorator) if self.source else {}

    def find(self, value: str) -> Declaration:
        """Return the declaration of the object that the setting names.

        Raises:
            ConfigError: There is no such object in the user's file, it takes other arguments, or
                its traits or options cannot be read.
        """
        if is_user_code(value):
            return _read_user_object(self, value)
        return self.registered().get(value) or Declaration(name=value, traits={}, options={})

    def find_traits(self, value: str, kind: Callable[..., TraitsT]) -> TraitsT:
        """Return the traits of the object that the setting names, as arguments of `kind`.

        Raises:
            ConfigError: Like `find`, or the decorator has other arguments.
        """
        traits = self.find(value).traits
        try:
            return kind(**traits)
        except (TypeError, ValueError) as error:
            cause = f"@{self.decorator}: {error}"
            raise ConfigError(self.key, value, self.expected, cause) from error

    def check_options(self, value: str, given: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` for an option that `value` does not have or accept."""
        options = self.find(value).options
        for name, got in given.items():
            key = f"{self.options_key}.{name}"
            if name not in options:
                near = get_close_matches(name, options, n=1, cutoff=0.0)
                raise ConfigError(
                    key,
                    got,
                    f"an option of {self.key}={value}: {', '.join(options) or 'it has none'}",
                    (f"a mistyped name, the nearest is {near[0]}, or " if near else "")
                    + f"an option of another {self.key}",
                )
            check_range(options[name].accepts(got), key, got, options[name].expected)


class _UnreadableError(ValueError):
    """A definition that cannot be read or used; the message is the cause for the user."""


@cache
def _read_registered(source: Path, decorator: str) -> dict[str, Declaration]:
    """Return what the functions of a file or folder declare, by registered name."""
    declarations = {}
    for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
        for statement in _parse(file).body:
            if isinstance(statement, ast.FunctionDef):
                for call in _find_decorators(statement, decorator):
                    name = _read_literal(call.args[0], "its name")
                    declarations[name] = _read_function(statement, call, name)
    return declarations


@cache
def _read_user_object(setting: CodeSetting, reference: str) -> Declaration:
    """Return what a user's function or class declares, and check that it can be called."""
    key, expected = setting.key, setting.expected
    try:
        file, name = find_user_source(reference, setting.default_name)
        module = _parse(file)
    except (OSError, ImportError, SyntaxError, ValueError) as error:
        cause = _describe_source_error(error, reference)
        raise ConfigError(key, reference, expected, cause) from error
    try:
        return _read_definition(setting, module, name)
    except _UnreadableError as error:
        raise ConfigError(key, reference, expected, str(error)) from error


def _describe_source_error(error: Exception, reference: str) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "; ".join(filter(None, [text, describe_class(reference)]))


def _read_definition(setting: CodeSetting, module: ast.Module, name: str) -> Declaration:
    definitions: dict[str, Definition] = {
        statement.name: statement
        for statement in module.body
        if isinstance(statement, ast.FunctionDef | ast.ClassDef)
    }
    definition = definitions.get(name)
    if isinstance(definition, ast.ClassDef) and setting.method:
        _check_method(definition, setting)
        options = _read_class_options(definition, definitions)
        summary = _read_summary(definition)
        return Declaration(name=name, summary=summary, traits={}, options=options)
    if isinstance(definition, ast.FunctionDef) and not setting.method:
        _check_arguments(definition, setting.arguments)
        calls = list(_find_decorators(definition, setting.decorator))
        if setting.needs_decorator and not calls:
            raise _UnreadableError(f"{name} does not have the decorator {setting.decorator}")
        return _read_function(definition, calls[-1] if calls else None, name)
    kind = "class" if setting.method else "function"
    raise _UnreadableError(
        f"the file does not define a {kind} {name}; it defines "
        f"{', '.join(definitions) or 'nothing'}"
    )


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _find_decorators(definition: Definition, decorator: str) -> Iterator[ast.Call]:
    for node in definition.decorator_list:
        if isinstance(node, ast.Call) and last_name(node.func) == decorator:
            yield node


def last_name(node: ast.expr) -> str:
    """Return `b` for the expressions `b` and `a.b`, and an empty string for any other."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _read_literal(node: ast.expr, what: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        message = f"{what} is {ast.unparse(node)}, expected a literal"
        raise _UnreadableError(message) from error


def _read_keywords(call: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments of a call."""
    name = last_name(call.func)
    return {
        keyword.arg or "**": _read_literal(keyword.value, f"{keyword.arg} of {name}")
        for keyword in call.keywords
    }


def _read_summary(definition: Definition) -> str:
    return (ast.get_docstring(definition) or "").partition("\n")[0]


def _check_arguments(function: ast.FunctionDef, arguments: tuple[str, ...]) -> None:
    """Raise an error unless the function can be called with these positional arguments."""
    spec = function.args
    num_positional = len(spec.posonlyargs) + len(spec.args)
    num_required = num_positional - len(spec.defaults)
    if len(arguments) < num_required or (len(arguments) > num_positional and not spec.vararg):
        raise _UnreadableError(
            f"the arguments of {function.name} are ({ast.unparse(spec)}), expected "
            f"({', '.join(arguments)}) and options behind a *"
        )


def _check_method(definition: ast.ClassDef, setting: CodeSetting) -> None:
    """Check the arguments of the method; it may be inherited, but not from the abstract base."""
    methods = [
        statement
        for statement in definition.body
        if isinstance(statement, ast.FunctionDef) and statement.name == setting.method
    ]
    for method in methods:
        _check_arguments(method, setting.arguments)
    if not methods and {last_name(base) for base in definition.bases} <= {setting.base}:
        raise _UnreadableError(f"{definition.name} does not define {setting.method}")


def _read_function(function: ast.FunctionDef, call: ast.Call | None, name: str) -> Declaration:
    """Return what a function declares; `call` is its decorator."""
    docs = _read_argument_docs(ast.get_docstring(function) or "")
    spec = function.args
    return Declaration(
        name=name,
        summary=_read_summary(function),
        traits={} if call is None else _read_keywords(call),
        options={
            arg.arg: _read_option(arg.arg, arg.annotation, default, docs.get(arg.arg, ""))
            for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        },
    )


def _read_class_options(
    definition: ast.ClassDef, definitions: Mapping[str, Definition]
) -> dict[str, Option]:
    """Return the fields of a dataclass and of its bases in the same file."""
    options: dict[str, Option] = {}
    others = {name: node for name, node in definitions.items() if node is not definition}
    for base in definition.bases:
        base_class = others.get(last_name(base))
        if isinstance(base_class, ast.ClassDef):
            options |= _read_class_options(base_class, others)
    decorators = [
        node.func if isinstance(node, ast.Call) else node for node in definition.decorator_list
    ]
    if "dataclass" not in map(last_name, decorators):
        return options
    for statement, following in pairwise([*definition.body, ast.Pass()]):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        doc = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            doc = " ".join(str(following.value.value).split())
        name = statement.target.id
        options[name] = _read_option(name, statement.annotation, statement.value, doc)
    return options


def check_keyword_function(
    reference: str, key: str, expected: str, *, default_name: str, keywords: tuple[str, ...]
) -> None:
    """Check a user's function that is called by keyword, as far as its source shows it.

    A function that is imported from elsewhere or changed by a decorator passes without a check of
    its arguments; the processes that load the function check it again.

    Args:
        reference: `FILE.py`, `FILE.py:NAME` or `package.module:NAME`.
        key: Dotted key of the setting, for errors.
        expected: What the function should be, for errors.
        default_name: Name of the function if the reference has none.
        keywords: Names of the arguments that it may be called with; others need defaults.

    Raises:
        ConfigError: There is no such file, module or function, or it needs other arguments.
    """
    try:
        file, name = find_user_source(reference, default_name, allow_compiled=True)
        if file.suffix != ".py":
            return
        module = _parse(file)
    except (OSError, ImportError, SyntaxError, ValueError) as error:
        cause = _describe_source_error(error, reference)
        raise ConfigError(key, reference, expected, cause) from error
    functions = [
        statement
        for statement in module.body
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name
    ]
    cause = ""
    if not functions:
        names = _bound_names(module)
        if name not in names and "*" not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.0)
            cause = f"{file} has no {name}" + (f", the nearest name is {near[0]}" if near else "")
    elif not functions[-1].decorator_list:
        cause = _missing_keywords(functions[-1], keywords)
    if cause:
        raise ConfigError(key, reference, expected, cause)


def _bound_names(module: ast.Module) -> set[str]:
    """Return all names that a module may define; `*` is among them if there may be any others."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
            names.add("*")
    return names


def _missing_keywords(
    function: ast.FunctionDef | ast.AsyncFunctionDef, keywords: tuple[str, ...]
) -> str:
    """Return which arguments the function needs beside the keywords; empty for none."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    required = {arg.arg for arg in positional[: len(positional) - len(spec.defaults)]}
    required |= {
        arg.arg
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        if default is None
    }
    unnamed = required & {arg.arg for arg in spec.posonlyargs}
    other = sorted(required - set(keywords) | unnamed)
    if not other or "completions" in required:  # a function of TRL may need any column
        return ""
    position = " by position" if unnamed else ""
    return f"{function.name} also needs {', '.join(other)}{position}: give a default, or wrap it"


def _read_option(
    name: str, annotation: ast.expr | None, default_node: ast.expr | None, doc: str
) -> Option:
    if default_node is None:
        raise _UnreadableError(f"the option {name} has no default")
    default = _read_literal(default_node, f"the default of the option {name}")
    bounds = Range()
    if (
        isinstance(annotation, ast.Subscript)
        and last_name(annotation.value) == "Annotated"
        and isinstance(annotation.slice, ast.Tuple)
    ):
        annotation, *marks = annotation.slice.elts
        for mark in marks:
            if isinstance(mark, ast.Call) and last_name(mark.func) == "Range":
                bounds = _read_range(mark)
    types = tuple(ast.unparse(annotation).split(" | ")) if annotation else ()
    return Option(
        name=name,
        default=default,
        types=types if set(types) <= _CHECKED_TYPES else (),
        bounds=bounds,
        doc=doc,
    )


def _read_range(call: ast.Call) -> Range:
    try:
        return Range(**_read_keywords(call))
    except TypeError as error:
        raise _UnreadableError(f"{ast.unparse(call)}: {error}") from error


def _read_argument_docs(docstring: str) -> dict[str, str]:
    """Return the descriptions in the section `Args:` of a docstring by name."""
    docs: dict[str, str] = {}
    name = ""
    for line in docstring.partition("\nArgs:\n")[2].splitlines():
        if not line.startswith("    "):
            break
        if head := re.fullmatch(r"    \*{0,2}(\w+): (.*)", line):
            name = head[1]
            docs[name] = head[2]
        elif name:
            docs[name] += f" {line.strip()}"
    return docs

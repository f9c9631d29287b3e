"""Function calls read out of text, in the forms that models and data sets write them.

    JSON      {"name": "f", "arguments": {"a": 1}}, a list of these, arguments also as
              "parameters" or "args" or as JSON in a string, the call also inside
              {"function": {...}} or with its name as "function"
    Python    f(a=1), or a list [f(a=1), g.h(b="x")], or one call a line

between <tool_call> tags, in a code fence, or bare. Prose around calls in tags, fences or brackets
is no part of them. What is parsed is compared by `Call`, equal where name and arguments are,
whatever the order of keys: numbers by value (1, 1.0, "1"), booleans and null in either spelling,
tuples as lists. A number is never a boolean. Nothing is evaluated or run.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Value = tuple[Any, ...]
"""A normalised argument: its kind, then what it is; hashable."""

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCED = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BARE_NAMES = frozenset({"true", "false", "null"})
_OPENING = re.compile(r"[\[{]")
MAX_CHARS = 100_000
MAX_TRIES = 50


class CallError(ValueError):
    """Text that is meant as calls and cannot be read; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. arguments: name and normalised value, sorted by name; positional ones as #0, #1."""

    name: str
    arguments: tuple[tuple[str, Value], ...]


def read_calls(text: str) -> list[Call]:
    """The calls in the text, in order; empty where nothing looks like one.

    Raises `CallError` where tags or fences hold something else, or where nothing can be read
    although a call seems meant.
    """
    if len(text) > MAX_CHARS:
        raise CallError(f"got {len(text)} characters, expected at most {MAX_CHARS}")
    try:
        return _whole(text.strip())  # before tags are looked for: an argument may hold some
    except CallError as error:
        not_whole = error
    pieces = _TAGGED.findall(text)
    if not pieces and "<tool_call>" in text:
        raise CallError("the closing tool_call tag is missing")
    pieces = pieces or _FENCED.findall(text)
    if pieces:
        return [call for piece in pieces for call in _whole(piece.strip())]
    calls = [call for piece in _bracketed(text) for call in piece]
    if not calls and re.search(r"\[\s*[\w.]+\s*\(|\"(name|function)\"\s*:", text):
        raise not_whole
    return calls


def normal(value: Any) -> Value:
    """The value as it is compared; raises `CallError` for what JSON cannot hold."""
    if isinstance(value, str):
        word = value.strip()
        if word.lower() in ("true", "false"):
            return ("bool", _WORDS[word.lower()])
        return ("number", float(word)) if _NUMBER.fullmatch(word) else ("text", word)
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int) and abs(value) > 2**53:
        return ("number", value)
    if isinstance(value, int | float):
        return ("number", float(value))
    if value is None:
        return ("null",)
    if isinstance(value, list | tuple):
        return ("list", *(normal(item) for item in value))
    if isinstance(value, dict):
        return ("map", *_sorted((str(key), normal(item)) for key, item in value.items()))
    if isinstance(value, Call):
        return ("call", value)
    raise CallError(f"got an argument of type {type(value).__name__}, expected a JSON value")


def _whole(text: str) -> list[Call]:
    """The calls of a text that holds nothing else; empty for an empty text or list."""
    if not text:
        return []
    try:
        try:
            value = json.loads(text)
        except ValueError:
            return _from_python(text)
        return _from_json(value)
    except RecursionError as error:
        raise CallError("calls or arguments are nested too deeply") from error


def _from_json(value: Any) -> list[Call]:
    if isinstance(value, list):
        return [call for item in value for call in _from_json(item)]
    if not isinstance(value, dict):
        raise CallError(f"got JSON of type {type(value).__name__}, expected calls as objects")
    if isinstance(value.get("function"), dict):
        return _from_json(value["function"])
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        raise CallError("there is no name in a call")
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise CallError(f"the arguments of {name} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {name} are no object")
    return [_call(name, arguments)]


def _from_python(text: str) -> list[Call]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise CallError(f"neither JSON nor Python calls: {error}") from error
    calls: list[Call] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            raise CallError("got a Python statement, expected calls")
        node = statement.value
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        calls += [_python_call(item) for item in nodes]
    return calls


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise CallError(f"got {type(node).__name__}, expected a call")
    arguments = {f"#{index}": _literal(value) for index, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise CallError("got ** in a call, expected named arguments")
        arguments[keyword.arg] = _literal(keyword.value)
    return _call(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise CallError(f"got {type(node).__name__}, expected the name of a function")


def _literal(node: ast.expr) -> Any:
    """A Python literal as a JSON value; nested calls stay calls."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _BARE_NAMES:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _literal(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _literal(operand)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CallError("got a sign before something that is no number")
            return -value if isinstance(sign, ast.USub) else value
        case ast.Call():
            return _python_call(node)
    raise CallError(f"got {type(node).__name__} as an argument, expected a literal")


def _key(node: ast.expr | None) -> str:
    if node is None:
        raise CallError("got ** in a dictionary, expected keys")
    value = _literal(node)
    if isinstance(value, list | dict | Call):
        raise CallError("got a key that is no text or number")
    return str(value)


def _call(name: str, arguments: dict[str, Any]) -> Call:
    return Call(name, tuple(_sorted((key, normal(value)) for key, value in arguments.items())))


def _sorted(pairs: Iterable[tuple[str, Value]]) -> list[tuple[str, Value]]:
    return sorted(pairs, key=lambda pair: pair[0])


def _bracketed(text: str) -> Iterator[list[Call]]:
    """The calls of every outermost [...] or {...} in the prose that can be read.

    At most `MAX_TRIES` brackets are looked at: more is no prose with calls in it.
    """
    position = 0
    for _ in range(MAX_TRIES):
        match = _OPENING.search(text, position)
        if match is None:
            return
        position = match.end()
        end = _closing(text, match.start())
        if end is None:
            continue
        try:
            calls = _whole(text[match.start() : end])
        except CallError:
            continue
        if calls:
            position = end
            yield calls


def _closing(text: str, start: int) -> int | None:
    """Position behind the bracket that closes the one at `start`; quotes are skipped over."""
    depth, quote, position = 0, "", start
    while position < len(text):
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return None

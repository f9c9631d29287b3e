"""Parses function calls from text, in the forms that models and data sets write them.

    JSON      {"name": "f", "arguments": {"a": 1}}, or a list of these; arguments may be called
              "parameters" or "args" or be JSON text; the call may be inside {"function": {...}} or
              have its name as "function"
    Python    f(a=1), a list [f(a=1), g.h(b="x")], or one call per line

Calls may be between <tool_call> tags, in a code fence, or bare; prose around tags, fences or
brackets is ignored. Parsed calls are equal if their names and arguments are equal, in any order of
the keys. Arguments are normalised: numbers compare by value (1 and 1.0), booleans and null in the
spelling of JSON or Python, and tuples as lists; a number never equals a boolean. A text stays a
text: "02134" is not "2134". `read_word` says which number or boolean a text spells. No code is
evaluated or run.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NormalizedValue = tuple[Any, ...]
"""A hashable normalised argument: a kind such as `number` or `list`, followed by the value or the
items."""

_TOOL_CALL_TAG = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CODE_FENCE = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_LITERAL_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BARE_NAMES = frozenset({"true", "false", "null"})
_OPENING_BRACKET = re.compile(r"[\[{]")
MAX_CHARS = 100_000
"""Characters of the longest text that is parsed."""
MAX_BRACKETS = 50
"""Brackets in prose that are tried as the start of calls."""


class CallParseError(ValueError):
    """A text looks like calls but cannot be parsed."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A parsed function call."""

    name: str
    arguments: tuple[tuple[str, NormalizedValue], ...]
    """Pairs of name and normalised value, sorted by name; positional arguments are #0, #1, ..."""


def parse_calls(text: str) -> list[FunctionCall]:
    """Return the calls in the text in order, or [] if nothing looks like a call.

    Raises:
        CallParseError: tags or fences contain something other than calls, a text that looks like a
            call cannot be parsed, or the text is longer than `MAX_CHARS`.
    """
    if len(text) > MAX_CHARS:
        raise CallParseError(f"got {len(text)} characters, expected at most {MAX_CHARS}")
    try:
        # The whole text is tried first, because an argument may contain tags.
        return _parse_whole_text(text.strip())
    except CallParseError as error:
        whole_text_error = error
    # Up to the last closing tag: each opening tag without one is searched to the end of the text.
    pieces = _TOOL_CALL_TAG.findall(text[: text.rfind("</tool_call>") + len("</tool_call>")])
    if not pieces and "<tool_call>" in text:
        raise CallParseError("the closing tool_call tag is missing")
    pieces = pieces or _CODE_FENCE.findall(text)
    if pieces:
        return [call for piece in pieces for call in _parse_whole_text(piece.strip())]
    calls = [call for piece in _iter_bracketed_calls(text) for call in piece]
    if not calls and re.search(r"\[\s*[\w.]+\s*\(|\"(name|function)\"\s*:", text):
        raise whole_text_error
    return calls


def normalize_value(value: Any) -> NormalizedValue:
    """Return the normalised form of a value; raise `CallParseError` if it is not a JSON value."""
    if isinstance(value, str):
        return ("text", value.strip())
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int) and abs(value) > 2**53:
        return ("number", value)
    if isinstance(value, int | float):
        return ("number", float(value))
    if value is None:
        return ("null",)
    if isinstance(value, list | tuple):
        return ("list", *(normalize_value(item) for item in value))
    if isinstance(value, dict):
        return (
            "map",
            *_sorted_by_name((str(key), normalize_value(item)) for key, item in value.items()),
        )
    if isinstance(value, FunctionCall):
        return ("call", value)
    raise CallParseError(f"got an argument of type {type(value).__name__}, expected a JSON value")


def read_word(word: str) -> NormalizedValue:
    """Return the number or boolean that a text spells, the text itself if it spells none."""
    if word.lower() in ("true", "false"):
        return ("bool", _LITERAL_WORDS[word.lower()])
    return ("number", float(word)) if _NUMBER.fullmatch(word) else ("text", word)


def _parse_whole_text(text: str) -> list[FunctionCall]:
    """Parse a text that consists of calls only; [] for an empty text or list."""
    if not text:
        return []
    try:
        try:
            value = json.loads(text)
        except ValueError:
            return _calls_from_python(text)
        return _calls_from_json(value)
    except RecursionError as error:
        raise CallParseError("calls or arguments are nested too deeply") from error


def _calls_from_json(value: Any) -> list[FunctionCall]:
    if isinstance(value, list):
        return [call for item in value for call in _calls_from_json(item)]
    if not isinstance(value, dict):
        raise CallParseError(f"got JSON of type {type(value).__name__}, expected calls as objects")
    if isinstance(value.get("function"), dict):
        return _calls_from_json(value["function"])
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        raise CallParseError("got a call without a name, expected a name as text")
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise CallParseError(f"the arguments of {name} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise CallParseError(f"the arguments of {name} are not a JSON object")
    return [_make_call(name, arguments)]


def _calls_from_python(text: str) -> list[FunctionCall]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise CallParseError(f"neither JSON nor Python calls: {error}") from error
    calls: list[FunctionCall] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            raise CallParseError("got a Python statement, expected calls")
        node = statement.value
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        calls += [_python_call(item) for item in nodes]
    return calls


def _python_call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call):
        raise CallParseError(f"got {type(node).__name__}, expected a call")
    arguments = {f"#{index}": _literal_value(value) for index, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise CallParseError("got ** in a call, expected named arguments")
        arguments[keyword.arg] = _literal_value(keyword.value)
    return _make_call(_function_name(node.func), arguments)


def _function_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_function_name(node.value)}.{node.attr}"
    raise CallParseError(f"got {type(node).__name__}, expected the name of a function")


def _literal_value(node: ast.expr) -> Any:
    """Convert a Python literal to a JSON value; nested calls become `FunctionCall`s."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _BARE_NAMES:
            return _LITERAL_WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_dict_key(key): _literal_value(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _literal_value(operand)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CallParseError("got a sign before a value that is not a number")
            return -value if isinstance(sign, ast.USub) else value
        case ast.Call():
            return _python_call(node)
    raise CallParseError(f"got {type(node).__name__} as an argument, expected a literal")


def _dict_key(node: ast.expr | None) -> str:
    if node is None:
        raise CallParseError("got ** in a dictionary, expected keys")
    value = _literal_value(node)
    if isinstance(value, list | dict | FunctionCall):
        raise CallParseError("got a dictionary key that is neither text nor a number")
    return str(value)


def _make_call(name: str, arguments: dict[str, Any]) -> FunctionCall:
    return FunctionCall(
        name,
        tuple(_sorted_by_name((key, normalize_value(value)) for key, value in arguments.items())),
    )


def _sorted_by_name(
    pairs: Iterable[tuple[str, NormalizedValue]],
) -> list[tuple[str, NormalizedValue]]:
    return sorted(pairs, key=lambda pair: pair[0])


def _iter_bracketed_calls(text: str) -> Iterator[list[FunctionCall]]:
    """Yield the calls of every outermost [...] or {...} that can be parsed.

    At most `MAX_BRACKETS` brackets are tried, which bounds the time.
    """
    position = 0
    for _ in range(MAX_BRACKETS):
        match = _OPENING_BRACKET.search(text, position)
        if match is None:
            return
        position = match.end()
        end = _closing_bracket_end(text, match.start())
        if end is None:
            continue
        try:
            calls = _parse_whole_text(text[match.start() : end])
        except CallParseError:
            continue
        if calls:
            position = end
            yield calls


def _closing_bracket_end(text: str, start: int) -> int | None:
    """Return the position after the bracket that closes the one at `start`; None if it is open."""
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

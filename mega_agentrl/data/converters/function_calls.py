"""Normalises expected function calls to one JSON form, and writes the matching system prompt.

Data sets write calls as `{"name": "f", "arguments": {"a": 1}}`, inside of `{"function": ...}`, with
arguments as JSON text, or as Python, `f(a=1)`. All become a JSON list on one line,
`[{"name": "f", "arguments": {"a": 1}}]`, which the function-call reward parses and, with
`match=string`, can compare as text. Nothing is evaluated: Python arguments must be literals.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.types.records import Message

CALLS_PROMPT = (
    "You can call functions. First reason between <think> and </think>. Then answer with the calls "
    "and nothing else, as one JSON list: "
    '[{"name": "<function>", "arguments": {"<argument>": <value>}}]. Several calls go into the '
    "same list, in the order they are to be made. Where no function fits, or an argument that is "
    "needed is not known, answer []."
)
_ARGUMENT_KEYS = ("arguments", "parameters", "args")


def format_calls_json(calls: Sequence[Mapping[str, Any]], row: SourceRow, field: str) -> str:
    """Return the calls as a JSON list on one line; raise `ValueError` for values without JSON."""
    try:
        return json.dumps(list(calls), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise row.error(
            field, calls, f"values that JSON can hold ({error})", "NaN, infinity or a Python set"
        ) from error


def example_answer(truth: str) -> str:
    """Return an answer that a ground truth of calls accepts: the first value of each argument."""
    try:
        calls = parse_json(truth)
    except ValueError:
        return truth
    if not isinstance(calls, list):
        return truth
    return json.dumps([_example_value(call) for call in calls], ensure_ascii=False)


def _example_value(value: Any) -> Any:
    """Return the first choice of a call or value in the form of `types.ground_truth`."""
    if isinstance(value, list):
        return [_example_value(item) for item in value]
    if not isinstance(value, dict) or not isinstance(value.get("accepted"), dict):
        return value
    chosen = {name: _example_value(values[0]) for name, values in value["accepted"].items()}
    return {"name": value["name"], "arguments": chosen} if "name" in value else chosen


def make_system_message(functions: Sequence[Any], system_text: str = "") -> Message:
    """Return the system message that offers the functions, followed by the row's system text."""
    parts = [CALLS_PROMPT]
    if functions:
        lines = [json.dumps(function, ensure_ascii=False) for function in functions]
        parts.append("The functions:\n<tools>\n" + "\n".join(lines) + "\n</tools>")
    if system_text:
        parts.append(system_text)
    return {"role": "system", "content": "\n\n".join(parts)}


def parse_json_call(value: Any, row: SourceRow, field: str) -> dict[str, Any]:
    """Convert one call from any JSON form to `{"name": ..., "arguments": {...}}`.

    Raises:
        ValueError: the value is not a call; the message names row and field.
    """
    call = value.get("function") if isinstance(value, dict) else None
    call = call if isinstance(call, dict) else value
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise row.error(field, value, "calls, each an object with a name and arguments")
    arguments: Any = next((call[key] for key in _ARGUMENT_KEYS if call.get(key) is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError as error:
            raise row.error(
                field, arguments, f"arguments of {name} as JSON", "a call that was cut"
            ) from error
    if not isinstance(arguments, dict):
        raise row.error(field, arguments, f"the arguments of {name} as an object")
    return {"name": name, "arguments": arguments}


def parse_python_call(
    text: Any, parameters: Mapping[str, Sequence[str]], row: SourceRow, field: str
) -> dict[str, Any]:
    """Convert a Python call such as `f(1, b="x")` to a call with named arguments.

    `parameters` has the names of each function's parameters in order; `row` and `field` are named
    in error messages.

    Raises:
        ValueError: the text is not a call with literal arguments.
    """
    expected = "a Python call with literal arguments, as f(a=1)"
    if not isinstance(text, str):
        raise row.error(field, text, expected)
    try:
        name, values, named = read_python_call(text)
    except ValueError as error:
        raise row.error(field, text, expected) from error
    names = parameters.get(name, ())
    if len(values) > len(names):
        raise row.error(
            field,
            text,
            f"at most {len(names)} arguments by position: {list(names)}",
            "the description of this function is missing or of another version",
        )
    return {"name": name, "arguments": dict(zip(names, values, strict=False)) | named}


def read_python_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, positional and named arguments of a Python call such as `a.f(1, b="x")`.

    Nothing is evaluated: arguments must be literals.

    Raises:
        ValueError: the text is something else.
    """
    # `literal_eval` also raises errors for unhashable keys and deep nesting.
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or any(word.arg is None for word in node.keywords):
            raise ValueError(f"got {text[:200]!r}, expected one call without **")
        values = [ast.literal_eval(argument) for argument in node.args]
        named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        return ast.unparse(node.func), values, named
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"got {text[:200]!r}, expected a call with literal arguments") from error


def parameter_names(functions: Sequence[Any]) -> dict[str, list[str]]:
    """Return the parameter names of each function, from a JSON schema or a mapping by name."""
    names: dict[str, list[str]] = {}
    for name, parameters in parameter_schemas(functions).items():
        properties = parameters.get("properties", parameters)
        names[name] = list(properties if isinstance(properties, dict) else ())
    return names


def parameter_schemas(functions: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return what each function's description says about its parameters."""
    schemas: dict[str, dict[str, Any]] = {}
    for item in functions:
        inner = item.get("function") if isinstance(item, dict) else None
        function = inner if isinstance(inner, dict) else item
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if isinstance(parameters, dict) and isinstance(function.get("name"), str):
            schemas[function["name"]] = parameters
    return schemas

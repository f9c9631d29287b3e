"""What a tool takes: an OpenAI-style function schema, and the check of a call against it.

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}

`parameters` is a JSON schema (draft 2020-12) of an object. Nothing is fetched: a reference to
another document does not resolve. Errors of the schema are the author's (`ValueError` at
construction), errors of arguments the policy's (`ValueError` with a text it can read).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON_ARGUMENTS = "*"
"""The argument under which a call's text is a JSON object of all arguments."""

MAX_MESSAGE_CHARS = 300

_KEYS = {"name", "description", "parameters", "strict"}


class FunctionSchema:
    """A checked schema. where: names its origin in errors, such as a file and an entry."""

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        self.function = _function_of(schema, where)
        self.name: str = self.function["name"]
        self.parameters: Mapping[str, Any] = self.function["parameters"]
        self._validator = _validator(self.parameters)
        self._by_name = {
            name: _validator(part) for name, part in self.parameters.get("properties", {}).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The schema as chat templates take it."""
        return {"type": "function", "function": self.function}

    def takes(self, argument: str) -> bool:
        """Whether `argument` is one of the parameters."""
        return argument in self._by_name

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the schema wants them; raises `ValueError` for the policy to read.

        A text is read as JSON where the parameter takes no text: a tag holds nothing else.
        """
        given = dict(arguments)
        if JSON_ARGUMENTS in given:
            given = self._read_object(str(given[JSON_ARGUMENTS]))
        given = {name: self._read_one(name, value) for name, value in given.items()}
        error = best_match(self._validator.iter_errors(given))
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            message = f"{place}: {error.message}" if place else error.message
            raise ValueError(f"Tool({self.name}) got wrong arguments: {_cut(message)}")
        return given

    def _read_one(self, name: str, value: Any) -> Any:
        validator = self._by_name.get(name)
        if not isinstance(value, str) or validator is None or validator.is_valid(value):
            return value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed if validator.is_valid(parsed) else value

    def _read_object(self, text: str) -> dict[str, Any]:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            got = f"{error}"
        else:
            if isinstance(given, dict):
                return given
            got = f"got {type(given).__name__}"
        names = ", ".join(self._by_name)
        raise ValueError(
            f"Tool({self.name}) takes a JSON object with some of the keys {names}; {_cut(got)}"
        )


def _function_of(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or schema.get("type") != "function":
        raise ValueError(
            f"{where}: got {_cut(repr(schema))}, expected {{type: function, function: {{name, "
            "description, parameters}}}; probable cause: the outer or inner level is missing"
        )
    if unknown := sorted(set(function) - _KEYS):
        raise ValueError(f"{where}: function has {unknown}, expected some of {sorted(_KEYS)}")
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        raise ValueError(
            f"{where}: function.name={name!r}, expected 1 to 64 letters, digits, _ and -"
        )
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(
            f"{where}: function.parameters of {name} is no JSON schema: {_cut(error.message)}"
        ) from error
    if parameters.get("type", "object") != "object":
        raise ValueError(
            f"{where}: function.parameters.type of {name} is {parameters['type']!r}, "
            "expected object; a call has named arguments"
        )
    description = str(function.get("description", ""))
    return {"name": name, "description": description, "parameters": dict(parameters)}


def _validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, registry=Registry())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."

"""A tool's OpenAI-style function schema, and the validation of calls against it.

The schema has the form::

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}

`parameters` is a JSON schema (draft 2020-12) of an object. Nothing is fetched: references to other
documents do not resolve. An invalid schema is an error of its author (`ValueError` at
construction); wrong arguments are an error of the policy (`ValueError` with a message for it).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL_ARGUMENTS_AS_JSON = "*"
"""Name of the argument whose text is a JSON object of all arguments."""

MAX_MESSAGE_CHARS = 300

_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


class FunctionSchema:
    """A validated function schema.

    Args:
        schema: the schema.
        where: origin of the schema for error messages, such as a file and an entry.
    """

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        self.function = _validate_function(schema, where)
        self.name: str = self.function["name"]
        self.parameters: Mapping[str, Any] = self.function["parameters"]
        self._validator = _make_validator(self.parameters)
        self._parameter_validators = {
            name: _make_validator(parameter)
            for name, parameter in self.parameters.get("properties", {}).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the schema in the form that chat templates take."""
        return {"type": "function", "function": self.function}

    def has_parameter(self, argument: str) -> bool:
        """Return whether `argument` is one of the parameters."""
        return argument in self._parameter_validators

    @property
    def examples(self) -> list[Any]:
        """Arguments of example calls: the keyword `examples` of the parameters."""
        return list(self.parameters.get("examples", ()))

    def validate_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the types that the schema asks for.

        A text is parsed as JSON where the parameter does not take a text, since a tag can hold
        only text.

        Raises:
            ValueError: the arguments do not fit; the message is for the policy.
        """
        values = dict(arguments)
        if ALL_ARGUMENTS_AS_JSON in values:
            values = self._parse_json_object(str(values[ALL_ARGUMENTS_AS_JSON]))
        values = {name: self._coerce_argument(name, value) for name, value in values.items()}
        error = best_match(self._validator.iter_errors(values))
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            message = f"{place}: {error.message}" if place else error.message
            raise ValueError(f"Tool({self.name}) got wrong arguments: {_truncate(message)}")
        return values

    def _coerce_argument(self, name: str, value: Any) -> Any:
        validator = self._parameter_validators.get(name)
        if not isinstance(value, str) or validator is None or validator.is_valid(value):
            return value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed if validator.is_valid(parsed) else value

    def _parse_json_object(self, text: str) -> dict[str, Any]:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            got = f"{error}"
        else:
            if isinstance(parsed, dict):
                return parsed
            got = f"got {type(parsed).__name__}"
        names = ", ".join(self._parameter_validators)
        raise ValueError(
            f"Tool({self.name}) takes a JSON object with some of the keys {names}; {_truncate(got)}"
        )


def _validate_function(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or schema.get("type") != "function":
        raise InputError(
            where,
            schema,
            "{type: function, function: {name, description, parameters}}",
            "the outer or inner level is missing",
        )
    if unknown := sorted(set(function) - _FUNCTION_KEYS):
        raise InputError(f"{where}, function", unknown, f"some of {sorted(_FUNCTION_KEYS)}")
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        raise InputError(f"{where}, function.name", name, "1 to 64 letters, digits, _ and -")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        key = f"{where}, function.parameters of {name}"
        raise InputError(key, parameters, "a JSON schema", _truncate(error.message)) from error
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InputError(
            f"{where}, function.parameters of {name}",
            parameters,
            "the JSON schema of an object; a call has named arguments",
        )
    description = str(function.get("description", ""))
    return {"name": name, "description": description, "parameters": dict(parameters)}


def _make_validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, registry=Registry())


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."

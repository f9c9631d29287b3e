"""A tool's OpenAI-style function schema, and the validation of calls against it.

The schema has the form::

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}

`parameters` is a JSON schema of an object: of the draft that its `$schema` names, else of the first
of the drafts 2020-12, 7 and 4 that it fits. It may use references within itself (`$defs`). Nothing
is fetched: references to other documents do not resolve. Patterns are those of a linear-time engine
(`schema_validator`), which has no look-around and no references to groups. An invalid schema is an
error of its author (`InputError` at construction); wrong arguments are an error of the policy
(`ToolInputError`), and so are arguments that cannot be checked within the bounds of a check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.call_protocol.json_text import (
    check_depth,
    decode,
    decode_nested,
    without_surrogates,
)
from mega_agentrl.tool.schema_validator import (
    MAX_CHECK_STEPS,
    MAX_REFERENCE_STEPS,
    MAX_SCHEMA_STEPS,
    CheckTooLargeError,
    bounded_kind,
    bounded_work,
    is_readable_pattern,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jsonschema.protocols import Validator

ALL_ARGUMENTS_AS_JSON = "*"
"""Name of the argument whose text is a JSON object of all arguments."""

MAX_MESSAGE_CHARS = 300

VALUE_KEYWORDS = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""

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
        key = f"{where}, function.parameters of {self.name}"
        self._num_subschemas = _check_patterns(self.parameters, key)
        self._validator = _make_validator(self.parameters, key)
        self._parameter_validators = {
            name: [self._validator.evolve(schema=schema) for schema in schemas]
            for name, schemas in _parameter_schemas(self.parameters).items()
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

        A text is parsed as JSON where the parameter does not take a text: a tag can hold only text,
        and policies encode objects once too often.

        Raises:
            ToolInputError: the arguments do not fit; the message is for the policy.
        """
        given = dict(arguments)
        if ALL_ARGUMENTS_AS_JSON in given:
            given = self._parse_json_object(str(given[ALL_ARGUMENTS_AS_JSON]))
        try:
            check_depth(given)
        except ValueError as depth:
            raise ToolInputError(f"Tool({self.name}) got wrong arguments: {depth}") from None
        try:
            with bounded_work(MAX_CHECK_STEPS, num_subschemas=self._num_subschemas):
                values: dict[str, Any] = without_surrogates(
                    {name: self._coerce_argument(name, value) for name, value in given.items()}
                )
                error = best_match(self._validator.iter_errors(values))
        except CheckTooLargeError:
            raise ToolInputError(
                f"Tool({self.name}) got arguments that are too large to be checked"
            ) from None
        except Exception as failure:
            # Arguments choose which part of a schema is followed, and that part may fail.
            text = f"Tool({self.name}) got arguments that cannot be checked against its schema"
            raise ToolInputError(f"{text}: {type(failure).__name__}") from failure
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            message = f"{place}: {error.message}" if place else error.message
            raise ToolInputError(f"Tool({self.name}) got wrong arguments: {_truncate(message)}")
        return values

    def _coerce_argument(self, name: str, value: Any) -> Any:
        validators = self._parameter_validators.get(name, ())
        if not isinstance(value, str) or not validators or _fits_one(value, validators):
            return value
        try:
            parsed = decode(value)
        except ValueError:
            return value
        return parsed if _fits_one(parsed, validators) else value

    def _parse_json_object(self, text: str) -> dict[str, Any]:
        try:
            parsed = decode_nested(text)
        except ValueError as error:
            got = f"{error}"
        else:
            if isinstance(parsed, dict):
                return parsed
            got = f"got {type(parsed).__name__}"
        names = ", ".join(self._parameter_validators)
        raise ToolInputError(
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
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InputError(
            f"{where}, function.parameters of {name}",
            parameters,
            "the JSON schema of an object; a call has named arguments",
        )
    description = str(function.get("description", ""))
    return {"name": name, "description": description, "parameters": dict(parameters)}


def _make_validator(parameters: Mapping[str, Any], key: str) -> Validator:
    """Return a validator of arguments; `key` names the schema in errors."""
    draft = parameters.get("$schema")
    if isinstance(draft, str):
        kinds = [validator_for({"$schema": draft}, default=Draft202012Validator)]
    else:
        kinds = [Draft202012Validator, Draft7Validator, Draft4Validator]
    schemas = list(_subschemas(parameters))
    has_pattern_names = any("patternProperties" in schema for schema in schemas)
    causes: list[str] = []
    for unbounded_kind in kinds:
        kind = bounded_kind(unbounded_kind, has_pattern_names=has_pattern_names)
        validator: Validator = kind(parameters, registry=Registry())
        try:
            with bounded_work(MAX_SCHEMA_STEPS, num_subschemas=0):
                _check_against_draft(kind, parameters)
            with bounded_work(MAX_REFERENCE_STEPS, num_subschemas=len(schemas)):
                _check_references(validator, schemas)
        except ValidationError as error:
            causes.append(_truncate(error.message))
        except CheckTooLargeError as error:
            cause = "it is too large, or doubles its alternatives at each level"
            raise InputError(key, parameters, "a JSON schema", cause) from error
        except Unresolvable as error:
            causes.append(f"a reference leads nowhere: {_truncate(str(error))}")
        except RecursionError:
            causes.append("it is nested too deeply, or refers to itself without end")
        else:
            return validator
    raise InputError(key, parameters, "a JSON schema", causes[0])


def _check_against_draft(kind: type[Validator], parameters: Mapping[str, Any]) -> None:
    """Raise `ValidationError` unless the parameters are a schema of the draft."""
    error = best_match(kind(kind.META_SCHEMA).iter_errors(parameters))
    if error is not None:
        raise error


def _check_patterns(parameters: Mapping[str, Any], key: str) -> int:
    """Return the number of objects in the schema; raises `InputError` for an unusable pattern."""
    num_subschemas = 0
    for schema in _subschemas(parameters):
        num_subschemas += 1
        names = schema.get("patternProperties", ())
        patterns = [schema.get("pattern"), *(names if isinstance(names, dict) else ())]
        for pattern in patterns:
            if isinstance(pattern, str) and not is_readable_pattern(pattern):
                expected = "a pattern of linear time: without look-around, references to groups "
                expected += "and huge repetitions"
                raise InputError(f"{key}, pattern", pattern, expected)
    return num_subschemas


def _check_references(validator: Validator, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Follow every reference once, which raises for one that leads nowhere or in a circle."""
    if any("$id" in schema for schema in schemas[1:]):
        return  # they may be relative to it
    for schema in schemas:
        if isinstance(schema.get("$ref"), str):
            validator.evolve(schema={"$ref": schema["$ref"]}).is_valid(None)


def _subschemas(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and the objects in it that may be schemas, itself first."""
    pending: list[Any] = [parameters]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending += [value for key, value in item.items() if key not in VALUE_KEYWORDS]
        elif isinstance(item, list):
            pending += item


def _parameter_schemas(parameters: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the schemas of each parameter, of which there are several in alternatives."""
    combined = (parameters.get(key, ()) for key in ("allOf", "anyOf", "oneOf"))
    found: dict[str, list[Any]] = {}
    for part in (parameters, *(part for parts in combined for part in parts)):
        properties = part.get("properties", {}) if isinstance(part, dict) else {}
        for name, schema in properties.items():
            found.setdefault(name, []).append(schema)
    return found


def _fits_one(value: Any, validators: list[Validator]) -> bool:
    return any(validator.is_valid(value) for validator in validators)


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."

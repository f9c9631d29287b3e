"""Checks the class and the schema of a tool before anything starts.

A method that is not `async`, or takes other parameters than the base class says, would otherwise
fail at every call of the run.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_code import source_location
from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import Tool
from mega_agentrl.tool.function import FunctionTool
from mega_agentrl.tool.function_schema import ALL_ARGUMENTS_AS_JSON, FunctionSchema

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_METHODS = (
    "create",
    "execute",
    "fork",
    "calc_reward",
    "release",
    "start",
    "close",
    "close_now",
    "check_kwargs",
    "schema",
)
"""Methods of `Tool` that a subclass may override."""


def check_methods(tool: Tool, key: str) -> None:
    """Check that the methods of a tool can be called like those of `Tool`.

    Args:
        tool: the tool.
        key: origin of the tool for error messages, such as a file and an entry.

    Raises:
        ConfigError: a method is not callable, is `async` where `Tool`'s is not or the reverse, or
            cannot be called with the arguments of `Tool`'s; or there is `create` without `fork`.
            The error's key ends in `CLASS.METHOD`, its cause has file and line.
    """
    for name in _METHODS:
        method, base_method = getattr(tool, name), getattr(Tool, name)
        if getattr(method, "__func__", None) is base_method:
            continue
        place = f"{key}, {type(tool).__name__}.{name}"
        is_async = inspect.iscoroutinefunction(base_method)
        parameters = list(inspect.signature(base_method).parameters)
        expected = f"{'async ' if is_async else ''}def {name}({', '.join(parameters)})"
        if not callable(method):
            raise ConfigError(place, method, expected)
        got = _format_signature(method, name)
        if inspect.iscoroutinefunction(inspect.unwrap(method)) is not is_async:
            problem = "the method is not async" if is_async else "the method is async"
            raise ConfigError(place, got, expected, f"{problem} ({source_location(method)})")
        try:
            inspect.signature(method).bind(*parameters[1:])
        except TypeError as error:
            cause = f"a call with {len(parameters) - 1} positional arguments: {error}"
            raise ConfigError(
                place, got, expected, f"{cause} ({source_location(method)})"
            ) from error
    tool_class = type(tool)
    if tool_class.create is not Tool.create and tool_class.fork is Tool.fork:
        raise ConfigError(
            f"{key}, {tool_class.__name__}.fork",
            "not defined",
            "async def fork(self, state), as the class has a method create",
            "branches of a trajectory would share one state; return the state itself if they may "
            f"({source_location(tool_class.create)})",
        )


def validated_schema(tool: Tool, where: str) -> FunctionSchema:
    """Return the validated schema of a tool.

    Args:
        tool: the tool.
        where: origin of the tool for error messages.

    Raises:
        ValueError: the schema is invalid, or fits no call, or does not fit the tool's name, its
            `text_argument` or, for a function, its parameters.
    """
    try:
        raw_schema = tool.schema()
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(
            f"{where}, {type(tool).__name__}.schema",
            tool.parameters,
            "a JSON schema of an object as parameters, or a method that returns the schema",
            f"{type(error).__name__}: {error}",
        ) from error
    schema = FunctionSchema(raw_schema, where)
    if schema.name != tool.name:
        raise InputError(f"{where}, name in its schema", schema.name, tool.name)
    properties = schema.parameters.get("properties", {})
    if tool.text_argument != ALL_ARGUMENTS_AS_JSON and not schema.has_parameter(tool.text_argument):
        expected = f"one of the schema's properties {sorted(properties)}"
        raise InputError(f"{where}, text_argument", tool.text_argument, expected)
    check_callable(schema, where)
    if isinstance(tool, FunctionTool):
        known = set(inspect.signature(tool.function).parameters)
        if unknown := sorted(set(properties) - known):
            raise InputError(
                f"{where}, parameters of its schema",
                unknown,
                f"only those of the function {tool.function.__name__}, {sorted(known)} "
                f"({source_location(tool.function)})",
            )
    return schema


def check_callable(schema: FunctionSchema, where: str) -> None:
    """Raise `InputError` if no call could fit the schema, or an example does not."""
    properties = schema.parameters.get("properties", {})
    missing = sorted(set(schema.parameters.get("required", ())) - set(properties))
    if missing and schema.parameters.get("additionalProperties") is False:
        raise InputError(
            f"{where}, arguments that its schema requires and forbids",
            missing,
            f"some of its properties {sorted(properties)}; no call could fit",
        )
    for example in schema.examples:
        try:
            schema.validate_arguments(example)
        except (TypeError, ValueError) as error:
            expected = "an object of arguments of a call"
            raise InputError(f"{where}, example", example, expected, str(error)) from error


def _format_signature(method: Callable[..., Any], name: str) -> str:
    is_async = inspect.iscoroutinefunction(inspect.unwrap(method))
    function = inspect.unwrap(getattr(method, "__func__", method))
    parameters = ", ".join(inspect.signature(function).parameters)
    return f"{'async ' if is_async else ''}def {name}({parameters})"

"""Turns a function with type hints and a docstring into a tool: the decorator `@tool`.

Example::

    @tool(timeout_s=5)
    def area(width: float, height: float = 1.0) -> float:
        '''Return the area of a rectangle.'''
        return width * height

Name, description, parameters and defaults come from the function, descriptions of parameters from
the section `Args:` of its docstring. Hints may be str, int, float, bool, list[...], dict, dict[str,
...], Literal, Optional, unions of these, and Any. An async function runs on the event loop. A plain
function runs in its own thread, which cannot be killed: after a timeout the thread continues and
occupies its slot until it ends. The response is the returned text, or any other value as JSON; a
`ToolResponse` is used as it is. `base.ToolInputError` is an error of the policy, any other
exception a failure of the tool. The decorated object can still be called like the function.

In a tag, a function with one required parameter receives the text as its value; any other function
receives a JSON object.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.function_schema import ALL_ARGUMENTS_AS_JSON

DEFAULT_MAX_CONCURRENT = 32
"""Concurrent calls of a plain function that sets no limit of its own."""

_SCALAR_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def choose_text_argument(parameters: Mapping[str, Any]) -> str:
    """Return the argument that gets a tag's text: the only required one, or the only one, or all.

    Args:
        parameters: JSON schema of the arguments.
    """
    properties = list(parameters.get("properties", ()))
    required = [name for name in parameters.get("required", ()) if name in properties]
    single = required if len(required) == 1 else properties if len(properties) == 1 else []
    return single[0] if single else ALL_ARGUMENTS_AS_JSON


class FunctionTool(Tool):
    """A tool around one function, made by the decorator `tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout_s: float = 60.0,
        max_concurrent: int | None = None,
        examples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        where = f"tool {self.name}"
        self.description, parameter_docs = parse_docstring(inspect.getdoc(function) or "")
        self.parameters = parameters_schema(function, parameter_docs, where)
        if examples:
            self.parameters["examples"] = [dict(example) for example in examples]
        self.text_argument = choose_text_argument(self.parameters)
        self.timeout_s = timeout_s
        self._is_async = inspect.iscoroutinefunction(function)
        self.max_concurrent = max_concurrent or (None if self._is_async else DEFAULT_MAX_CONCURRENT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Call the function; `kwargs` overrides the arguments of the policy."""
        call_kwargs = {**arguments, **kwargs}
        if self._is_async:
            value = await self.function(**call_kwargs)
        else:
            value = await run_in_thread(lambda: self.function(**call_kwargs))
        if isinstance(value, ToolResponse):
            return value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return ToolResponse(text=text)

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that `execute_kwargs` names only parameters of the function."""
        assert self.parameters is not None
        known = set(self.parameters["properties"])
        if unknown := sorted(set(kwargs.get("execute_kwargs") or {}) - known):
            raise InputError(
                f"tools_kwargs[{self.name!r}].execute_kwargs",
                unknown,
                f"some of the function's parameters {sorted(known)}",
            )


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float = 60.0,
    max_concurrent: int | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float = 60.0,
    max_concurrent: int | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Decorate a function to make it a tool, with or without arguments.

    Args:
        function: the function.
        name: name of the tool; the function's if None.
        timeout_s: limit of one call.
        max_concurrent: concurrent calls, None for no limit (32 for a plain function).
        examples: arguments of calls, which become part of the schema; the preflight makes them.

    Raises:
        ValueError: a parameter's hint is missing or has no JSON form.
    """

    def decorate(decorated: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            decorated,
            name=name,
            timeout_s=timeout_s,
            max_concurrent=max_concurrent,
            examples=examples,
        )

    return decorate if function is None else decorate(function)


async def run_in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread, which does not delay the end of the process.

    A first cancellation waits until the thread has ended, so that its slot stays occupied; a second
    one takes effect at once.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tool-function").start()
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait({waiting})
        raise


def parameters_schema(
    function: Callable[..., Any], parameter_docs: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters, from its type hints.

    Args:
        function: a function or bound method.
        parameter_docs: descriptions of parameters.
        where: names the function in errors.

    Raises:
        InputError: a parameter has no hint, no JSON form, or cannot be passed by name.
    """
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(where, f"*{name}", "named parameters only")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(where, f"{name}, /", "a parameter that is passed by name")
        if name not in hints:
            raise InputError(f"{where}: parameter {name}", "no type hint", "a type hint")
        properties[name] = _type_hint_schema(hints[name], f"{where}: parameter {name}")
        if name in parameter_docs:
            properties[name]["description"] = parameter_docs[name]
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = _default_as_json(
                parameter.default, f"{where}: parameter {name}"
            )
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _default_as_json(default: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(default))
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}, its default", default, "a JSON value") from error


def _type_hint_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint."""
    if hint is Any:
        return {}
    if hint in _SCALAR_TYPES:
        return {"type": _SCALAR_TYPES[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is list:
        return {"type": "array"} | ({"items": _type_hint_schema(inner[0], where)} if inner else {})
    if origin is dict and (not inner or inner[0] is str):
        values = _type_hint_schema(inner[1], where) if inner else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_hint_schema(member, where) for member in inner]}
    raise InputError(
        where,
        hint,
        "str, int, float, bool, list, dict with str keys, Literal, Optional, a union of these, or "
        "Any",
    )


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the entries of the section `Args:`."""
    section = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):$")
    lines = text.splitlines()
    headings = [index for index, line in enumerate(lines) if section.match(line)]
    description = " ".join(" ".join(lines[: headings[0] if headings else None]).split())
    parameter_docs: dict[str, str] = {}
    for head, end in pairwise([*headings, len(lines)]):
        if lines[head] not in ("Args:", "Arguments:", "Parameters:"):
            continue
        body = inspect.cleandoc("\n" + "\n".join(lines[head + 1 : end]))
        for entry in re.split(r"\n(?=\S)", body):
            match = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", entry, re.DOTALL)
            if match:
                parameter_docs[match[1]] = " ".join(match[2].split())
    return description, parameter_docs

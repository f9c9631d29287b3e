"""A function becomes a tool: `@tool` over type hints and a docstring.

    @tool(timeout_s=5)
    def area(width: float, height: float = 1.0) -> float:
        '''Area of a rectangle.

        Args:
            width: in metres.
            height: in metres.
        '''
        return width * height

Name, description, parameters and defaults come from the function; hints may be str, int, float,
bool, list[...], dict, dict[str, ...], Literal, Optional, unions of these, and Any. An async
function runs on the event loop, a plain one in a thread of its own, which cannot be killed: past
the deadline it goes on, and its slot stays taken until it ends. The answer is the text that is
returned, anything else as JSON; a `ToolAnswer` is taken as it is. `ValueError` is the policy's
error. The decorated object is still called as the function it was.

In a tag, a function of one required parameter takes the text as that one's value; any other
takes a JSON object.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import types
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

from mega_agentrl.tool.protocol import Tool, ToolAnswer
from mega_agentrl.tool.schema import JSON_ARGUMENTS

MAX_THREADS = 32
"""Concurrent calls of a plain function that sets no limit of its own."""

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class FunctionTool(Tool):
    """A tool around one function; made by `tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout_s: float = 60.0,
        max_concurrent: int | None = None,
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        where = f"tool {self.name}"
        self.description, documented = _read_docstring(inspect.getdoc(function) or "")
        self.parameters = _parameters_of(function, documented, where)
        required = self.parameters["required"]
        properties = list(self.parameters["properties"])
        single = required if len(required) == 1 else properties if len(properties) == 1 else []
        self.argument = single[0] if single else JSON_ARGUMENTS
        self.deadline_s = timeout_s
        self._is_async = inspect.iscoroutinefunction(function)
        self.max_concurrent = max_concurrent or (None if self._is_async else MAX_THREADS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.function(*args, **kwargs)

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Call the function; `kwargs` fixes parameters, whatever the policy asked for."""
        given = {**arguments, **kwargs}
        if self._is_async:
            value = await self.function(**given)
        else:
            value = await _in_thread(lambda: self.function(**given))
        if isinstance(value, ToolAnswer):
            return value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return ToolAnswer(text=text)

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """The dataset may fix parameters of the function only."""
        assert self.parameters is not None
        known = set(self.parameters["properties"])
        if unknown := sorted(set(kwargs.get("execute_kwargs") or {}) - known):
            raise ValueError(
                f"tools_kwargs[{self.name!r}].execute_kwargs has {unknown}, expected some of "
                f"the function's parameters {sorted(known)}"
            )


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *, name: str | None = None, timeout_s: float = 60.0, max_concurrent: int | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float = 60.0,
    max_concurrent: int | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Decorator, with or without arguments.

    timeout_s: of one call. max_concurrent: calls at once. Raises `ValueError` for a parameter
    whose hint is missing or has no JSON form.
    """

    def decorate(decorated: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            decorated, name=name, timeout_s=timeout_s, max_concurrent=max_concurrent
        )

    return decorate if function is None else decorate(function)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread, which does not hold up the end of the process.

    A first cancellation is kept back until the thread has ended, so that a slot is not given
    away under it; a second one is obeyed.
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


def _parameters_of(
    function: Callable[..., Any], documented: Mapping[str, str], where: str
) -> dict[str, Any]:
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{where}: got parameter *{name}, expected named parameters only")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{where}: parameter {name} is positional-only, expected a named one")
        if name not in hints:
            raise ValueError(f"{where}: parameter {name} has no type hint, expected one")
        properties[name] = _schema_of(hints[name], f"{where}: parameter {name}")
        if name in documented:
            properties[name]["description"] = documented[name]
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = _plain(parameter.default, f"{where}: parameter {name}")
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _plain(default: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(default))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} has the default {default!r}, expected a JSON value") from error


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    """JSON schema of a type hint."""
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is list:
        return {"type": "array"} | ({"items": _schema_of(inner[0], where)} if inner else {})
    if origin is dict and (not inner or inner[0] is str):
        values = _schema_of(inner[1], where) if inner else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(part, where) for part in inner]}
    raise ValueError(
        f"{where} has the type {hint!r}, expected str, int, float, bool, list, dict with str keys, "
        "Literal, Optional, a union of these, or Any"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the entries of a section `Args:`."""
    section = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):$")
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if section.match(line)]
    description = " ".join(" ".join(lines[: heads[0] if heads else None]).split())
    documented: dict[str, str] = {}
    for head, end in pairwise([*heads, len(lines)]):
        if lines[head] not in ("Args:", "Arguments:", "Parameters:"):
            continue
        body = inspect.cleandoc("\n" + "\n".join(lines[head + 1 : end]))
        for entry in re.split(r"\n(?=\S)", body):
            found = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", entry, re.DOTALL)
            if found:
                documented[found[1]] = " ".join(found[2].split())
    return description, documented

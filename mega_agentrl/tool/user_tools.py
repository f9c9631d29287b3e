"""Loads user tools from a yaml file (`tool.user_tools_file`).

The file is a list of entries::

    - class_name: my_package.tools.Notes      # or tools.py:Notes, relative to the yaml file
      config: {folder: /data/notes}           # keyword arguments of the class
      timeout_s: 5                            # of one call; default: the class's
      max_concurrent: 8                       # concurrent calls; default: the class's
      tool_schema:                            # name, description, parameters; default: the class's
        type: function
        function: {name: notes, description: Keeps a note, parameters: {...}}

`class_name` names a subclass of `base.Tool`, a function decorated with `function.tool`, or a
subclass of `base.ToolSet`, which makes several tools (`api_classes`). One class may occur several
times under different names. As in verl, the list may stand below the key `tools`, and `config` may
have `type: native`; verl's classes themselves are refused. Loading imports the user's code, creates
the objects and checks their methods and schemas (`interface_check`), but starts nothing; every
error names file, entry and key.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_entries import read_user_entries
from mega_agentrl.tool.base import Tool, ToolSet
from mega_agentrl.tool.function import FunctionTool
from mega_agentrl.tool.function_schema import FunctionSchema
from mega_agentrl.tool.interface_check import check_methods, validated_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.config.user_entries import UserEntry

_EXPECTED_CLASS = (
    "a class derived from mega_agentrl.tool.base.Tool or ToolSet, or a function decorated with "
    "mega_agentrl.tool.function.tool"
)
_VERL_PARAMETER = "instance_id"
_VERL_CAUSE = (
    "it is a tool of verl. Derive it from Tool and take the keys of config as arguments of "
    "__init__; let create(kwargs) return the data that verl keeps under instance_id, and "
    "fork(state) copy it; let execute(state, arguments, kwargs) return ToolResponse(text=..., "
    "step_reward=..., metrics=...) instead of a tuple; see 'Tools written for verl' in "
    "docs/own_tool.md"
)


def load_user_tools(
    path: str | Path, built_in: Mapping[str, type[Tool]] | None = None
) -> list[Tool]:
    """Return the tools of the file in order; raises `ValueError` for any mistake in it.

    Args:
        path: the yaml file.
        built_in: classes of the other tools of the run by name, which no tool here may have.
    """
    optional_keys = ("timeout_s", "max_concurrent", "tool_schema")
    entries = read_user_entries(Path(path), "tool.user_tools_file", optional_keys, head="tools")
    owners = {name: f"the built-in {kind.__name__}" for name, kind in (built_in or {}).items()}
    tools = []
    for number, entry in enumerate(entries, start=1):
        class_name = entry.values["class_name"]
        for tool in _make_tools(entry):
            if tool.name in owners:
                raise ConfigError(
                    f"{entry.key}, class_name",
                    class_name,
                    f"a tool with another name than {tool.name}, which {owners[tool.name]} has",
                    "a copied class or entry; set another name in the class or in tool_schema",
                )
            owners[tool.name] = f"{class_name} (entry {number})"
            tools.append(tool)
    return tools


def _make_tools(entry: UserEntry) -> list[Tool]:
    """Return the tool of the entry, or those of its set."""
    target = _load(entry)
    entry = _without_verl_type(entry, target)
    if isinstance(target, type) and issubclass(target, ToolSet):
        if entry.values.get("tool_schema") is not None:
            raise ConfigError(f"{entry.key}, tool_schema", "a schema", "none for several tools")
        tools: Sequence[Tool] = entry.construct(target, ToolSet, _EXPECTED_CLASS).tools()
    elif isinstance(target, FunctionTool):
        if entry.arguments:
            raise ConfigError(f"{entry.key}, config", entry.arguments, "none for a function")
        tools = [copy.copy(target)]
    else:
        tools = [entry.construct(target, Tool, _EXPECTED_CLASS)]
    return [_configure_tool(tool, entry) for tool in tools]


def _configure_tool(tool: Tool, entry: UserEntry) -> Tool:
    """Apply the settings of the entry to the tool, check its class and return the tool."""
    if (timeout_s := entry.limit("timeout_s")) is not None:
        tool.timeout_s = float(timeout_s)
    if (max_concurrent := entry.limit("max_concurrent", is_whole=True)) is not None:
        tool.max_concurrent = max_concurrent
    if entry.values.get("tool_schema") is not None:
        _set_schema(tool, entry.values["tool_schema"], entry.key)
    for name in ("name", "text_argument"):
        if not isinstance(getattr(tool, name, None), str):
            raise ConfigError(
                f"{entry.key}, class_name",
                entry.values["class_name"],
                f"a class with a text as {name}"
                + (", or the name in tool_schema" if name == "name" else ""),
                f"it has no {name}",
            )
    check_methods(tool, entry.key)
    validated_schema(tool, f"{entry.key}, {tool.name}")
    return tool


def _load(entry: UserEntry) -> Any:
    """Return the class or function of the entry; refuse a class of verl."""
    name = entry.values["class_name"]
    key = f"{entry.key}, class_name"
    if name.startswith("verl."):
        raise ConfigError(key, name, _EXPECTED_CLASS, _VERL_CAUSE)
    target = entry.load(_EXPECTED_CLASS)
    if isinstance(target, type) and not issubclass(target, Tool | ToolSet):
        execute = getattr(target, "execute", None)
        if callable(execute) and _VERL_PARAMETER in inspect.signature(execute).parameters:
            raise ConfigError(key, name, _EXPECTED_CLASS, _VERL_CAUSE)
    return target


def _without_verl_type(entry: UserEntry, target: Any) -> UserEntry:
    """Return the entry without verl's `type: native` unless the class has such an argument."""
    if entry.arguments.get("type") != "native":
        return entry
    if isinstance(target, type) and "type" in inspect.signature(target).parameters:
        return entry
    arguments = {key: value for key, value in entry.arguments.items() if key != "type"}
    return replace(entry, values={**entry.values, "config": arguments})


def _set_schema(tool: Tool, raw: Any, where: str) -> None:
    schema = FunctionSchema(raw, f"{where}, tool_schema")
    tool.name = schema.name
    tool.description = schema.function["description"]
    tool.parameters = schema.parameters
    if tool.schema() != schema.as_dict():
        expected = f"none, because {type(tool).__name__} defines its own and would ignore this one"
        raise ConfigError(f"{where}, tool_schema", raw, expected)

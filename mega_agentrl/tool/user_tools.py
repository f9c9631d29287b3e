"""Loads user tools from a yaml file (`tool.user_tools_file`).

The file is a list of entries::

    - class_name: my_package.tools.Notes      # or tools.py:Notes, relative to the yaml file
      config: {folder: /data/notes}           # keyword arguments of the class
      timeout_s: 5                            # of one call; default: the class's
      max_concurrent: 8                       # concurrent calls; default: the class's
      tool_schema:                            # name, description, parameters; default: the class's
        type: function
        function: {name: notes, description: Keeps a note, parameters: {...}}

`class_name` names a subclass of `base.Tool` or a function decorated with `function.tool`. One class
may occur several times under different names. Loading imports the user's code and creates the
objects, but starts nothing; every error names file, entry and key.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_entries import read_user_entries
from mega_agentrl.tool.base import Tool
from mega_agentrl.tool.function import FunctionTool
from mega_agentrl.tool.function_schema import FunctionSchema

if TYPE_CHECKING:
    from mega_agentrl.config.user_entries import UserEntry

_EXPECTED_CLASS = (
    "a class derived from mega_agentrl.tool.base.Tool or a function decorated with "
    "mega_agentrl.tool.function.tool"
)


def load_user_tools(path: str | Path) -> list[Tool]:
    """Return the tools of the file in order; raises `ValueError` for any mistake in it."""
    own_keys = ("timeout_s", "max_concurrent", "tool_schema")
    entries = read_user_entries(Path(path), "tool.user_tools_file", own_keys)
    return [_make_tool(entry) for entry in entries]


def _make_tool(entry: UserEntry) -> Tool:
    found = entry.load(_EXPECTED_CLASS)
    if isinstance(found, FunctionTool):
        if entry.arguments:
            raise ConfigError(f"{entry.key}, config", entry.arguments, "none for a function")
        tool: Tool = copy.copy(found)
    else:
        tool = entry.construct(found, Tool, _EXPECTED_CLASS)
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
    return tool


def _set_schema(tool: Tool, raw: Any, where: str) -> None:
    schema = FunctionSchema(raw, f"{where}, tool_schema")
    tool.name = schema.name
    tool.description = schema.function["description"]
    tool.parameters = schema.parameters
    if tool.schema() != schema.as_dict():
        raise ValueError(
            f"{where}, tool_schema: {type(tool).__name__} defines its own schema and would "
            "ignore this one; expected no tool_schema here"
        )

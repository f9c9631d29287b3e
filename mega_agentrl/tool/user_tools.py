"""Loads user tools from a yaml file (`tool.user_tools_file`).

The file is a list of entries::

    - class_name: my_package.tools.Notes      # or tools.py:Notes, beside the yaml file
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
import importlib
import importlib.util
import inspect
import sys
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mega_agentrl.tool.base import Tool
from mega_agentrl.tool.function import FunctionTool
from mega_agentrl.tool.function_schema import FunctionSchema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

_ENTRY_KEYS = ("class_name", "config", "timeout_s", "max_concurrent", "tool_schema")


def load_user_tools(path: str | Path) -> list[Tool]:
    """Return the tools of the file in order; raises `ValueError` for any mistake in it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"tool.user_tools_file={path}: there is no such file; expected a yaml list of tools"
        )
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"tool.user_tools_file={path}: not valid yaml: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"tool.user_tools_file={path}: got {type(entries).__name__}, expected a non-empty "
            "list; probable cause: the dash before class_name is missing"
        )
    return [
        _load_entry(entry, path, f"tool.user_tools_file={path}, entry {number}")
        for number, entry in enumerate(entries, start=1)
    ]


def _load_entry(entry: Any, path: Path, where: str) -> Tool:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{where}: got {entry!r}, expected a mapping with class_name")  # noqa: TRY004
    if unknown := sorted(set(map(str, entry)) - set(_ENTRY_KEYS)):
        raise ValueError(
            f"{where}: unknown keys {unknown}, expected some of {', '.join(_ENTRY_KEYS)}"
        )
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ValueError(f"{where}, config: got {config!r}, expected a mapping")  # noqa: TRY004
    tool = _instantiate_tool(import_object(entry["class_name"], path, where), config, where)
    _set_limits(tool, entry, where)
    if entry.get("tool_schema") is not None:
        _set_schema(tool, entry["tool_schema"], where)
    for name in ("name", "text_argument"):
        if not isinstance(getattr(tool, name, None), str):
            raise ValueError(  # noqa: TRY004
                f"{where}: {entry['class_name']} has no {name}, expected it as text in the "
                "class" + (" or the name in tool_schema" if name == "name" else "")
            )
    return tool


def import_object(class_name: str, path: Path, where: str) -> Any:
    """Return the object that `class_name` names.

    Args:
        class_name: "package.module.Name", or "file.py:Name".
        path: the yaml file; a Python file is looked up beside it.
        where: names the entry in errors.

    Raises:
        ValueError: there is no such object.
    """
    place = f"{where}, class_name={class_name}"
    if ":" in class_name:
        file, _, name = class_name.rpartition(":")
        module = _import_file((path.parent / file).resolve(), place)
    else:
        package, _, name = class_name.rpartition(".")
        if not package:
            raise ValueError(f"{place}: expected package.module.Class or path/to/file.py:Class")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{place}: {error}; expected an importable module; probable cause: it "
                "is not installed, or the path is mistyped"
            ) from error
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"{place}: importing it failed: {_format_error(error)}") from error
    if not hasattr(module, name):
        available = [key for key, value in vars(module).items() if _is_tool(value)]
        raise ValueError(f"{place}: the module has no {name}; its tools are {available}")
    return getattr(module, name)


def _import_file(file: Path, place: str) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{place}: there is no file {file}; expected one, relative to the yaml")
    # A unique name for each file, since two files called tools.py are two modules.
    name = f"user_tool_{blake2b(str(file).encode(), digest_size=6).hexdigest()}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place}: {file} is not a Python file, expected a name ending in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{place}: importing {file} failed: {_format_error(error)}") from error
    return module


def _instantiate_tool(loaded: Any, config: Mapping[str, Any], where: str) -> Tool:
    if isinstance(loaded, FunctionTool):
        if config:
            raise ValueError(f"{where}, config: got {config}, expected none for a function")
        return copy.copy(loaded)
    if not (isinstance(loaded, type) and issubclass(loaded, Tool)):
        raise ValueError(  # noqa: TRY004
            f"{where}: {loaded!r} is not a tool, expected a class derived from "
            "mega_agentrl.tool.base.Tool or a function decorated with "
            "mega_agentrl.tool.function.tool; probable cause: the decorator is missing"
        )
    if inspect.isabstract(loaded):
        missing = sorted(loaded.__abstractmethods__)
        raise ValueError(f"{where}: {loaded.__name__} lacks the methods {missing}")
    signature = inspect.signature(loaded)
    try:
        signature.bind(**config)
    except TypeError as error:
        raise ValueError(
            f"{where}, config: {error}; {loaded.__name__} takes {list(signature.parameters)}, "
            f"got {sorted(config)}"
        ) from error
    try:
        return loaded(**config)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"{where}, config: {loaded.__name__} cannot be constructed from {dict(config)}: "
            f"{_format_error(error)}"
        ) from error


def _set_limits(tool: Tool, entry: Mapping[str, Any], where: str) -> None:
    if "timeout_s" in entry:
        value = entry["timeout_s"]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{where}, timeout_s={value!r}: expected seconds above 0")
        tool.timeout_s = float(value)
    if "max_concurrent" in entry:
        value = entry["max_concurrent"]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}, max_concurrent={value!r}: expected a whole number above 0")
        tool.max_concurrent = value


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


def _is_tool(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, Tool) and value is not Tool
    return is_class or isinstance(value, FunctionTool)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""Asks the servers of `tool.mcp` for their tools before the run starts.

The prompts are encoded with the schemas of the tools, before any process of the run is started.
Each server is therefore started once, asked, and ended again. All errors are `ConfigError`s that
name the server. A tool that cannot be used, because its schema is none, is left out with a line in
the log, unless the file names it under `include`.

Schemas are taken as servers write them: of any draft, empty or absent, or with alternatives at the
top. Patterns that `schema_validator` cannot match in linear time are left to the server.

A tool keeps its server's name for it where it can be called by it; other characters become
underscores. With tags the name is in lower case, because it becomes a tag. Where two tools of the
run would have the same name, or it is reserved, the name of the server stands before it.

What a server lists is bounded in number and size, because it is part of every prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.override_keys import nearest_name
from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.call_protocol.tags import RESERVED_NAMES
from mega_agentrl.tool.function_schema import VALUE_KEYWORDS, FunctionSchema
from mega_agentrl.tool.interface_check import check_callable
from mega_agentrl.tool.mcp.connection import McpConnection, McpServerError
from mega_agentrl.tool.mcp.server import ListedServer, ListedTool, not_started
from mega_agentrl.tool.mcp.server_file import KEY, read_server_file
from mega_agentrl.tool.schema_validator import is_readable_pattern

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mega_agentrl.tool.mcp.server_file import McpServerConfig

MAX_TOOLS = 512
"""Tools of a server; hosted servers with everything switched on have about 200."""
MAX_DESCRIPTION_CHARS = 32_000
"""Characters of a tool's description, which is in every prompt: some 8,000 tokens."""
MAX_SCHEMA_CHARS = 128 << 10
"""Characters of a tool's schema as JSON; generated ones have up to 50,000."""
MAX_LISTING_CHARS = 4 << 20
"""Characters of all tools of a server as JSON."""
_MAX_NAME_CHARS = 64

_log = logging.getLogger(__name__)


def list_servers(
    path: str,
    variables: Mapping[str, str],
    *,
    other_names: Collection[str] = (),
    protocol: CallProtocol = CallProtocol.hermes,
) -> list[ListedServer]:
    """Return the servers of the file with their tools; raises `ConfigError`.

    Args:
        path: The file of `tool.mcp`; empty for none.
        variables: Environment variables that the file may name.
        other_names: Names of the other tools of the run.
        protocol: How the policy writes calls.
    """
    if not path:
        return []
    configs = read_server_file(Path(path), variables)
    remote_tools = asyncio.run(_list_tools(configs))
    chosen = [
        (config, tool)
        for config, tools in zip(configs, remote_tools, strict=True)
        for tool in usable_tools(config, tools)
    ]
    names = choose_names([(c.name, t.remote_name) for c, t in chosen], set(other_names), protocol)
    by_server: dict[str, list[ListedTool]] = {config.name: [] for config in configs}
    for (config, tool), name in zip(chosen, names, strict=True):
        by_server[config.name].append(replace(tool, name=name))
    return [ListedServer(config=c, tools=tuple(by_server[c.name])) for c in configs]


async def _list_tools(configs: Sequence[McpServerConfig]) -> list[list[Any]]:
    """Return the tools of each server; raises the first server's error once all have ended."""
    results = await asyncio.gather(*map(_list_tools_of, configs), return_exceptions=True)
    listings: list[list[Any]] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        listings.append(result)
    return listings


async def _list_tools_of(config: McpServerConfig) -> list[Any]:
    connection = McpConnection(config)
    try:
        await connection.open()
        return await connection.list_tools()
    except (McpServerError, ToolInputError) as error:
        raise not_started(config, error) from error
    finally:
        await connection.close()


def usable_tools(config: McpServerConfig, tools: Sequence[Any]) -> list[ListedTool]:
    """Return the tools that the entry includes and that can be called, under their own names.

    Args:
        config: The entry.
        tools: What the server lists.

    Raises:
        ConfigError: The entry names an unknown tool, includes one that cannot be used by its name,
            or leaves none.
    """
    _check_size(config, tools)
    by_name: dict[str, Any] = {}
    for tool in tools:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name or name in by_name:
            cause = "the name is used twice" if name in by_name else "it has no name"
            _log.warning("%s: the tool %.100r is left out: %s", config.key, name, cause)
        else:
            by_name[name] = tool
    _check_names(config, list(by_name))
    chosen = by_name if config.include is None else config.include
    usable: list[ListedTool] = []
    causes: list[str] = []
    for name in chosen:
        if name in config.exclude:
            continue
        try:
            usable.append(_listed_tool(by_name[name], name))
        except (InputError, RecursionError) as error:
            cause = config.redact(str(error))
            if config.include is not None:
                expected = "a tool that can be called, because include names it"
                raise ConfigError(f"{config.key}, tool {name}", name, expected, cause) from error
            _log.warning("%s: the tool %.100s is left out: %.500s", config.key, name, cause)
            causes.append(cause)
    if not usable:
        expected = "at least one tool that is included and can be called"
        raise ConfigError(config.key, list(by_name), expected, "; ".join(causes[:1]))
    return usable


def _check_size(config: McpServerConfig, tools: Sequence[Any]) -> None:
    """Raise `ConfigError` for a listing that is too large."""
    if len(tools) > MAX_TOOLS:
        raise ConfigError(f"{config.key}, tools", len(tools), f"at most {MAX_TOOLS} tools")
    num_chars = len(json.dumps(tools))
    if num_chars > MAX_LISTING_CHARS:
        expected = f"at most {MAX_LISTING_CHARS} characters of tools"
        raise ConfigError(f"{config.key}, tools", num_chars, expected)


def _check_names(config: McpServerConfig, known: Sequence[str]) -> None:
    """Raise `ConfigError` for a name in `include` or `exclude` that the server does not have."""
    for key, names in (("include", config.include or ()), ("exclude", config.exclude)):
        for name in names:
            if name not in known:
                expected = f"some of the server's tools {', '.join(known)}"
                cause = f"nearest is {nearest_name(name, known)}" if known else ""
                raise ConfigError(f"{config.key}, {key}", name, expected, cause)


def choose_names(
    tools: Sequence[tuple[str, str]], other_names: set[str], protocol: CallProtocol
) -> list[str]:
    """Return a name of its own for each tool of the run.

    Args:
        tools: Name of the server and of its tool.
        other_names: Names of the other tools of the run.
        protocol: How the policy writes calls.

    Raises:
        ConfigError: Two names stay equal.
    """
    names = _prefixed_where_needed(tools, other_names, protocol)
    for name, count in Counter([*names, *other_names]).items():
        if count > 1:
            servers = [
                server for used, (server, _) in zip(names, tools, strict=True) if used == name
            ]
            expected = "tools with different names; rename a server, or exclude a tool"
            raise ConfigError(f"{KEY}, servers {', '.join(servers)}", name, expected)
    return names


def _prefixed_where_needed(
    tools: Sequence[tuple[str, str]], other_names: set[str], protocol: CallProtocol
) -> list[str]:
    short = [_callable_name(tool, protocol) for _, tool in tools]
    counts = Counter([*short, *other_names])
    return [
        name
        if counts[name] == 1 and _is_callable(name, protocol)
        else _callable_name(f"{server}_{tool}", protocol)
        for name, (server, tool) in zip(short, tools, strict=True)
    ]


def _callable_name(name: str, protocol: CallProtocol) -> str:
    if protocol is CallProtocol.tags:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        return re.sub(r"[^a-z0-9_]", "_", name)[:_MAX_NAME_CHARS]
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:_MAX_NAME_CHARS]


def _is_callable(name: str, protocol: CallProtocol) -> bool:
    if protocol is CallProtocol.tags:
        return name[:1].isalpha() and name not in RESERVED_NAMES
    return bool(name)


def _listed_tool(tool: Mapping[str, Any], name: str) -> ListedTool:
    """Return a tool that a server lists; raises `InputError` if it cannot be called."""
    where = f"tool {name}"
    num_chars = len(json.dumps(tool.get("inputSchema")))
    if num_chars > MAX_SCHEMA_CHARS:
        expected = f"at most {MAX_SCHEMA_CHARS} characters"
        raise InputError(f"{where}, length of inputSchema", num_chars, expected)
    parameters = _parameters(tool.get("inputSchema"), where)
    description = tool.get("description") or tool.get("title")
    if isinstance(description, str) and len(description) > MAX_DESCRIPTION_CHARS:
        expected = f"at most {MAX_DESCRIPTION_CHARS} characters"
        raise InputError(f"{where}, length of description", len(description), expected)
    hints = tool.get("annotations")
    return ListedTool(
        name=name,
        remote_name=name,
        description=description if isinstance(description, str) else "",
        parameters=parameters,
        is_read_only=isinstance(hints, dict) and hints.get("readOnlyHint") is True,
    )


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    """Return a server's `inputSchema` as the schema of an object that can be checked.

    Raises:
        InputError: It is none.
    """
    if not isinstance(schema, dict | None):
        raise InputError(f"{where}, inputSchema", schema, "a JSON schema of an object")
    given = {key: value for key, value in (schema or {}).items() if value is not None}
    if "object" in (kind := given.get("type", "object")) and isinstance(kind, list):
        given["type"] = "object"
    parameters = _without_foreign_patterns({"type": "object", "properties": {}, **given})
    try:
        return _checked(parameters, where)
    except InputError:
        if "examples" not in parameters:
            raise
        del parameters["examples"]  # calls that do not fit are no reason to leave a tool out
        return _checked(parameters, where)


def _checked(parameters: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": "tool", "description": "", "parameters": parameters}
    check_callable(FunctionSchema({"type": "function", "function": function}, where), where)
    return parameters


def _without_foreign_patterns(schema: Any) -> Any:
    """Return a schema without the patterns that cannot be matched in linear time."""
    if isinstance(schema, list):
        return [_without_foreign_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str) and not is_readable_pattern(value):
            continue
        if key == "patternProperties" and isinstance(value, dict):
            value = {
                pattern: item for pattern, item in value.items() if is_readable_pattern(pattern)
            }
        is_value = key in VALUE_KEYWORDS
        cleaned[key] = value if is_value else _without_foreign_patterns(value)
    return cleaned

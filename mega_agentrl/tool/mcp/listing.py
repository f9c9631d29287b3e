"""Asks the servers of `tool.mcp` for their tools before the run starts.

The prompts are encoded with the schemas of the tools, before any process of the run is started.
Each server is therefore started once, asked, and ended again. All errors are `ConfigError`s that
name the server.

A tool keeps its server's name for it where it can be called by it; other characters become
underscores. With tags the name is in lower case, because it becomes a tag. Where two tools of the
run would have the same name, or it is reserved, the name of the server stands before it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.override_keys import nearest_name
from mega_agentrl.tool.call_protocol.tags import RESERVED_NAMES
from mega_agentrl.tool.function_schema import FunctionSchema
from mega_agentrl.tool.mcp.connection import McpConnection, McpServerError
from mega_agentrl.tool.mcp.server import ListedServer, ListedTool, not_started
from mega_agentrl.tool.mcp.server_file import KEY, read_server_file

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import mcp_types

    from mega_agentrl.tool.mcp.server_file import McpServerConfig

_MAX_NAME_CHARS = 64


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
        for tool in _select(config, tools)
    ]
    names = choose_names([(c.name, t.name) for c, t in chosen], set(other_names), protocol)
    by_server: dict[str, list[ListedTool]] = {config.name: [] for config in configs}
    for (config, tool), name in zip(chosen, names, strict=True):
        by_server[config.name].append(_listed_tool(config, tool, name))
    return [ListedServer(config=c, tools=tuple(by_server[c.name])) for c in configs]


async def _list_tools(
    configs: Sequence[McpServerConfig],
) -> list[list[mcp_types.Tool]]:
    """Return the tools of each server; raises the first server's error once all have ended."""
    results = await asyncio.gather(*map(_list_tools_of, configs), return_exceptions=True)
    listings: list[list[mcp_types.Tool]] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        listings.append(result)
    return listings


async def _list_tools_of(config: McpServerConfig) -> list[mcp_types.Tool]:
    connection = McpConnection(config)
    try:
        await connection.open()
        return await connection.list_tools()
    except McpServerError as error:
        raise not_started(config, error) from error
    finally:
        await connection.close()


def _select(config: McpServerConfig, tools: Sequence[mcp_types.Tool]) -> list[mcp_types.Tool]:
    """Return the tools that the entry includes; raises `ConfigError` for unknown names."""
    known = [tool.name for tool in tools]
    check_range(len(set(known)) == len(known), config.key, known, "tools with different names")
    for key, names in (("include", config.include or ()), ("exclude", config.exclude)):
        for name in names:
            if name not in known:
                expected = f"some of the server's tools {', '.join(known)}"
                cause = f"nearest is {nearest_name(name, known)}" if known else ""
                raise ConfigError(f"{config.key}, {key}", name, expected, cause)
    chosen = known if config.include is None else config.include
    selected = [tool for tool in tools if tool.name in chosen and tool.name not in config.exclude]
    check_range(bool(selected), config.key, known, "at least one tool that is included")
    return selected


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


def _listed_tool(config: McpServerConfig, tool: mcp_types.Tool, name: str) -> ListedTool:
    description = tool.description or tool.title or ""
    function = {"name": name, "description": description, "parameters": tool.input_schema}
    try:
        FunctionSchema({"type": "function", "function": function}, f"tool {tool.name}")
    except ValueError as error:
        raise ConfigError(
            f"{config.key}, tool {tool.name}",
            name,
            "a tool with a JSON schema (draft 2020-12) as inputSchema",
            f'{config.redact(str(error))}; add "exclude": ["{tool.name}"] to do without it',
        ) from error
    hints = tool.annotations
    return ListedTool(
        name=name,
        remote_name=tool.name,
        description=description,
        parameters=tool.input_schema,
        is_read_only=bool(hints and hints.read_only_hint),
    )

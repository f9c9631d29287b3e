"""The tools of a run and the protocol of their calls: implements `types.protocols.ToolProvider`.

Call `start` before the first session and `close` at the end. A tool's limit on concurrent calls
holds over all sessions of a toolkit, which belong to one event loop. User tools come from a file
(`user_tools`) or are passed to `ToolKit`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.errors import InputError
from mega_agentrl.tool.call_protocol.hermes import HermesProtocol
from mega_agentrl.tool.call_protocol.tags import TagProtocol
from mega_agentrl.tool.function import FunctionTool
from mega_agentrl.tool.interface_check import validated_schema
from mega_agentrl.tool.python import PythonTool
from mega_agentrl.tool.search.search_tool import SearchTool
from mega_agentrl.tool.session import (
    METHODS,
    RegisteredTool,
    SessionLimits,
    TrajectoryToolSession,
    check_tools_kwargs,
)
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.tool.web.disk_cache import CACHE_TTL_S, MAX_CACHE_BYTES, DiskCache
from mega_agentrl.tool.workspace import BashTool, EditTool, WorkspaceTools
from mega_agentrl.tool.zoom import ZoomTool
from mega_agentrl.types.first_calls import FirstCalls

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from mega_agentrl.config.sections.tools import ToolConfig
    from mega_agentrl.tool.base import Tool
    from mega_agentrl.tool.mcp.server import ListedServer
    from mega_agentrl.tool.python import SandboxProvider
    from mega_agentrl.types.protocols import TextCodec
    from mega_agentrl.types.records import (
        AssistantText,
        InvalidToolCall,
        Prompt,
        ToolCall,
        ToolOutcome,
    )

_log = logging.getLogger(__name__)


class ToolKit:
    """The given tools and the protocol by which they are called.

    Args:
        tools: the tools, with unique names.
        limits: time limits of sessions.
        control_tokens: special tokens of the model's tokenizer, which are escaped in tool output.
        protocol: how calls are written.
        escapes: False, for the tag protocol only, passes tool output on without escaping.
        watched: names of the user's tools, whose first calls are watched (`types.first_calls`).
        max_failed_first_calls: number of first calls of which one must succeed; 0 watches none.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        limits: SessionLimits | None = None,
        control_tokens: Iterable[str] = (),
        protocol: CallProtocol = CallProtocol.tags,
        escapes: bool = True,
        watched: Collection[str] = (),
        max_failed_first_calls: int = 0,
    ) -> None:
        self._tools = {
            tool.name: _register_tool(tool, max_failed_first_calls if tool.name in watched else 0)
            for tool in tools
        }
        self._limits = limits or SessionLimits()
        self._call_protocol = _make_call_protocol(protocol, tools, control_tokens, escapes=escapes)
        if not escapes:
            _log.warning(
                "tool output reaches the policy unescaped, as in ARPO's published code: it can "
                "close tags, fake calls and earn rewards"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._tools)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags at which the engine must stop."""
        return self._call_protocol.stop_strings

    @property
    def uses_tool_messages(self) -> bool:
        """Whether responses are chat messages instead of text within the assistant's turn."""
        return self._call_protocol.uses_tool_messages

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Texts that mark a call in the policy's output."""
        return self._call_protocol.call_markers

    def schemas(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return OpenAI-style function schemas by name, of all tools if `names` is None."""
        chosen = self._tools if names is None else list(names)
        return {name: self._tools[name].schema.as_dict() for name in chosen}

    def check_prompt_kwargs(self, prompts: Iterable[Prompt]) -> None:
        """Raise `ValueError` naming the first prompt whose `tools_kwargs` cannot work."""
        for prompt in prompts:
            try:
                check_tools_kwargs(prompt.tools_kwargs, self._tools)
                # As in a session: a prompt that names no tool gets all of them.
                kwargs_by_tool = {
                    n: kwargs for n, kwargs in prompt.tools_kwargs.items() if kwargs is not None
                }
                for name in kwargs_by_tool or self._tools:
                    self._tools[name].tool.check_kwargs(kwargs_by_tool.get(name, {}))
            except ValueError as error:
                raise _with_prompt(error, prompt.prompt_id) from error

    async def start(self) -> None:
        """Start every tool.

        Raises:
            ValueError: a tool cannot start; all tools are closed again.
        """
        results = await asyncio.gather(
            *(registered.tool.start() for registered in self._tools.values()),
            return_exceptions=True,
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]

    async def close(self) -> None:
        """Close every tool. Safe to call twice."""
        await asyncio.gather(*(registered.tool.close() for registered in self._tools.values()))

    def close_now(self) -> None:
        """Close without an event loop."""
        for registered in self._tools.values():
            registered.tool.close_now()

    def open_session(self) -> TrajectoryToolSession:
        """Return a new session, whose `create` is still to be called."""
        return TrajectoryToolSession(self._tools, self._limits, self._call_protocol.escape)

    def parse_calls(self, turn_text: str) -> Sequence[ToolCall | InvalidToolCall]:
        """Return the calls of an assistant turn in order, including invalid ones."""
        return self._call_protocol.parse_calls(turn_text)

    def split_turn(self, turn_text: str) -> AssistantText:
        """Take an assistant turn apart; with tags, calls are part of the content."""
        return self._call_protocol.split_turn(turn_text)

    def render_outcome(self, outcome: ToolOutcome) -> str:
        """Return an outcome as text of the turn or content of a message, escaped."""
        return self._call_protocol.render(outcome.answer)


def built_in_tools(config: ToolConfig) -> dict[str, type[Tool]]:
    """Return the classes of the enabled built-in tools by name."""
    enabled: list[type[Tool]] = [PythonTool]
    if config.workspace.is_enabled:
        enabled += [BashTool, EditTool]
    if config.search.is_enabled:
        enabled.append(SearchTool)
    if config.browse.is_enabled:
        from mega_agentrl.tool.browse.browse_tool import BrowseTool

        enabled.append(BrowseTool)
    if config.zoom.enabled:
        enabled.append(ZoomTool)
    return {kind.name: kind for kind in enabled}


def load_tools(config: ToolConfig) -> list[Tool]:
    """Return the user's tools.

    Raises:
        ConfigError: a tool cannot be loaded, or has the name of another one.
    """
    if not config.user_tools_file:
        return []
    return load_user_tools(config.user_tools_file, built_in_tools(config))


def load_mcp_servers(
    config: ToolConfig,
    variables: Mapping[str, str],
    *,
    user_tools: Sequence[Tool] = (),
    protocol: CallProtocol = CallProtocol.tags,
) -> list[ListedServer]:
    """Start each server of `tool.mcp`, ask it for its tools and end it; return those with a tool.

    Args:
        config: section `tool`.
        variables: environment variables that the file may name.
        user_tools: what `load_tools` returns.
        protocol: how calls are written.

    Raises:
        ConfigError: the file has a mistake, or a server does not start or has no usable tool.
    """
    if not config.mcp:
        return []
    from mega_agentrl.tool.mcp.listing import list_servers

    other_names = [*built_in_tools(config), *(tool.name for tool in user_tools)]
    return list_servers(config.mcp, variables, other_names=other_names, protocol=protocol)


def build_toolkit(
    config: ToolConfig,
    codec: TextCodec,
    *,
    user_tools: Sequence[Tool] = (),
    mcp_servers: Sequence[ListedServer] = (),
    shows_images: bool = False,
    control_tokens: Iterable[str] = (),
    api_key: str = "",
    sandboxes: SandboxProvider | None = None,
    protocol: CallProtocol = CallProtocol.tags,
    escapes: bool = True,
    max_failed_first_calls: int = 0,
) -> ToolKit:
    """Return the configured tools: Python, then those that are enabled, then the user's.

    Nothing is started.

    Args:
        config: section `tool`.
        codec: counts the tokens of the answers of search, browse and MCP servers.
        user_tools: what `load_tools` returns.
        mcp_servers: what `load_mcp_servers` returns.
        shows_images: whether the model sees images in answers of MCP servers.
        control_tokens: special tokens of the model's tokenizer, which are escaped in tool output.
        api_key: the value of the environment variable `config.search.api_key_env`.
        sandboxes: where Python code runs; None for a pool in this process.
        protocol: how calls are written.
        escapes: False, for the tag protocol only, passes tool output on without escaping.
        max_failed_first_calls: number of first calls of a tool of the user or of an MCP server of
            which one must succeed.
    """
    cache = None
    fallback_dir = None
    if config.cache.path:
        path = Path(config.cache.path)
        cache = DiskCache(path, ttl_s=CACHE_TTL_S, max_bytes=MAX_CACHE_BYTES)
        fallback_dir = path.parent
    tools: list[Tool] = [PythonTool(config.python, sandboxes)]
    if config.workspace.is_enabled:
        tools += WorkspaceTools(config.workspace).tools()
    if config.search.is_enabled:
        tools.append(
            SearchTool(
                config.search,
                config.web,
                codec,
                max_response_tokens=config.max_response_tokens,
                cache=cache,
                fallback_dir=fallback_dir,
                api_key=api_key,
            )
        )
    if config.browse.is_enabled:
        from mega_agentrl.tool.browse.browse_tool import BrowseTool

        tools.append(
            BrowseTool(
                config.browse,
                config.web,
                codec,
                max_response_tokens=config.max_response_tokens,
                cache=cache,
            )
        )
    if config.zoom.enabled:
        tools.append(ZoomTool(config.zoom))
    watched_tools = [*user_tools, *_make_mcp_tools(config, codec, mcp_servers, shows_images)]
    return ToolKit(
        [*tools, *watched_tools],
        control_tokens=control_tokens,
        protocol=protocol,
        escapes=escapes,
        watched=[tool.name for tool in watched_tools],
        max_failed_first_calls=max_failed_first_calls,
    )


def _make_mcp_tools(
    config: ToolConfig, codec: TextCodec, servers: Sequence[ListedServer], shows_images: bool
) -> list[Tool]:
    if not servers:  # the SDK takes half a second to import
        return []
    from mega_agentrl.tool.mcp.server import AnswerLimits, make_tools

    limits = AnswerLimits(
        codec=codec, max_tokens=config.max_response_tokens, shows_images=shows_images
    )
    return [tool for server in servers for tool in make_tools(server, limits)]


def _make_call_protocol(
    protocol: CallProtocol,
    tools: Sequence[Tool],
    control_tokens: Iterable[str],
    *,
    escapes: bool,
) -> TagProtocol | HermesProtocol:
    match protocol:
        case CallProtocol.tags:
            arguments = {tool.name: tool.text_argument for tool in tools}
            return TagProtocol(arguments, control_tokens, escapes=escapes)
        case CallProtocol.hermes:
            return HermesProtocol((tool.name for tool in tools), control_tokens)
        case _:
            assert_never(protocol)


def _register_tool(tool: Tool, max_failed_first_calls: int) -> RegisteredTool:
    where = f"tool {tool.name}"
    schema = validated_schema(tool, where)
    limit = tool.max_concurrent
    if limit is not None and limit < 1:
        raise InputError(f"{where}, max_concurrent", limit, "at least 1, or None for no limit")
    slots = asyncio.Semaphore(sys.maxsize if limit is None else limit)
    first_calls = {}
    if max_failed_first_calls:
        first_calls = {
            method: FirstCalls(
                f"tool {tool.name}, {method}", _source_file(tool), max_failed_first_calls
            )
            for method in METHODS
        }
    return RegisteredTool(tool=tool, schema=schema, slots=slots, first_calls=first_calls)


def _with_prompt(error: ValueError, prompt_id: str) -> InputError:
    """Return the error of a prompt's kwargs; tools of users raise any `ValueError`."""
    if isinstance(error, InputError):
        name = f"prompt {prompt_id}, {error.name}"
        return InputError(name, error.got, error.expected, error.cause)
    return InputError(f"prompt {prompt_id}", str(error), "tools_kwargs that its tools accept")


def _source_file(tool: Tool) -> str:
    """Return where a tool is declared: a file, or its module's name if it has no file."""
    if tool.declared_in:
        return tool.declared_in
    source = tool.function if isinstance(tool, FunctionTool) else type(tool)
    try:
        return inspect.getfile(source)
    except (TypeError, OSError):
        return source.__module__

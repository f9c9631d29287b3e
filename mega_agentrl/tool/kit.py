"""The tools of a run and how the policy calls them: `ports.ToolProvider`.

`start` before the first session, `close` at the end. A limit on concurrent calls holds over
all sessions of a kit. A tool of one's own comes from a file (`own`), or is passed to `ToolKit`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from mega_agentrl.config.choices import CallProtocol
from mega_agentrl.tool.cache import SIZE_BYTES, TTL_S, DiskCache
from mega_agentrl.tool.hermes import HermesProtocol
from mega_agentrl.tool.own import load_tools
from mega_agentrl.tool.python import PythonTool
from mega_agentrl.tool.schema import JSON_ARGUMENTS, FunctionSchema
from mega_agentrl.tool.search import SearchTool
from mega_agentrl.tool.session import (
    Installed,
    SessionLimits,
    TrajectoryTools,
    check_tools_kwargs,
)
from mega_agentrl.tool.slots import Slots
from mega_agentrl.tool.tags import TagProtocol
from mega_agentrl.types.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.config.tool_schema import ToolConfig
    from mega_agentrl.tool.protocol import Tool
    from mega_agentrl.tool.python import Sandboxes
    from mega_agentrl.types.ports import TextCodec
    from mega_agentrl.types.records import BadCall, Prompt, ToolOutcome

_log = logging.getLogger(__name__)


class ToolKit:
    """The given tools and the way they are called.

    limits: of creating and waiting, see `SessionLimits`. control_tokens: texts that the
    model's tokenizer has tokens of its own for; escaped in what tools say.
    escapes: False, with tags alone, gives the policy what tools say as it is.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        limits: SessionLimits | None = None,
        control_tokens: Iterable[str] = (),
        protocol: CallProtocol = CallProtocol.tags,
        escapes: bool = True,
    ) -> None:
        names = [tool.name for tool in tools]
        if len(set(names)) != len(names):
            raise ValueError(f"tools: names {names}, expected each name once")
        self._tools = {tool.name: _install(tool) for tool in tools}
        self._limits = limits or SessionLimits()
        self._calls = _protocol(protocol, tools, control_tokens, escapes=escapes)
        if not escapes:
            _log.warning(
                "tool output reaches the policy unescaped, as in ARPO's published code: what a "
                "tool returns can close tags, fake calls and earn rewards"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._tools)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags after which the engine must stop."""
        return self._calls.stop_strings

    @property
    def answers_in_chat(self) -> bool:
        """Whether answers are chat messages instead of text inside of the assistant's turn."""
        return self._calls.in_chat

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts by which calls are found in what the policy says."""
        return self._calls.marks

    def schemas(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """OpenAI-style function schemas by name; of all tools where `names` is None."""
        chosen = self._tools if names is None else list(names)
        return {name: self._tools[name].schema.as_dict() for name in chosen}

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise `ValueError` naming the first prompt whose `tools_kwargs` cannot work."""
        for prompt in prompts:
            try:
                check_tools_kwargs(prompt.tools_kwargs, self._tools)
                # As in a session: without any name the prompt gets all tools.
                given = {
                    n: kwargs for n, kwargs in prompt.tools_kwargs.items() if kwargs is not None
                }
                for name in given or self._tools:
                    self._tools[name].tool.check_kwargs(given.get(name, {}))
            except ValueError as error:
                raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error

    async def start(self) -> None:
        """Start every tool; raises `ValueError` for what is missing, with none left running."""
        started = await asyncio.gather(
            *(installed.tool.start() for installed in self._tools.values()),
            return_exceptions=True,
        )
        failures = [result for result in started if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]

    async def close(self) -> None:
        """End every tool; safe to call twice."""
        await asyncio.gather(*(installed.tool.close() for installed in self._tools.values()))

    def close_now(self) -> None:
        """`close` from synchronous code."""
        for installed in self._tools.values():
            installed.tool.close_now()

    def open(self) -> TrajectoryTools:
        """A new session, not yet created."""
        return TrajectoryTools(self._tools, self._limits, self._calls.escape)

    def read(self, turn_text: str) -> Sequence[ToolCall | BadCall]:
        """The calls of an assistant turn in order, those that cannot be read among them."""
        return self._calls.read(turn_text)

    def parse(self, turn_text: str) -> ToolCall | None:
        """The call that an assistant turn ends in; None where there is none or it is empty."""
        calls = self.read(turn_text)
        return calls[-1] if calls and isinstance(calls[-1], ToolCall) else None

    def render(self, outcome: ToolOutcome) -> str:
        """An outcome as text of the turn, or as content of a message, control tags escaped."""
        return self._calls.render(outcome.answer)


def build_toolkit(
    config: ToolConfig,
    codec: TextCodec,
    *,
    control_tokens: Iterable[str] = (),
    api_key: str = "",
    sandboxes: Sandboxes | None = None,
    protocol: CallProtocol = CallProtocol.tags,
    escapes: bool = True,
) -> ToolKit:
    """The configured tools: Python always, search and browse where enabled, then one's own.

    codec: counts the tokens of what search and browse show. api_key: what the environment
    variable `config.search.key_env` holds. sandboxes: for Python; None for a pool in this
    process. Raises `ValueError` for tools of one's own that cannot be loaded; starts nothing.
    """
    cache = None
    fallback_dir = None
    if config.cache.path:
        path = Path(config.cache.path)
        cache = DiskCache(path, ttl_s=TTL_S, size_bytes=SIZE_BYTES)
        fallback_dir = path.parent
    tools: list[Tool] = [PythonTool(config.python, sandboxes)]
    if config.search.enabled:
        tools.append(
            SearchTool(
                config.search,
                config.web,
                codec,
                answer_tokens=config.answer_tokens,
                cache=cache,
                fallback_dir=fallback_dir,
                api_key=api_key,
            )
        )
    if config.browse.enabled:
        from mega_agentrl.tool.browse import BrowseTool

        tools.append(
            BrowseTool(
                config.browse, config.web, codec, answer_tokens=config.answer_tokens, cache=cache
            )
        )
    if config.file:
        tools += load_tools(config.file)
    return ToolKit(tools, control_tokens=control_tokens, protocol=protocol, escapes=escapes)


def _protocol(
    protocol: CallProtocol,
    tools: Sequence[Tool],
    control_tokens: Iterable[str],
    *,
    escapes: bool,
) -> TagProtocol | HermesProtocol:
    match protocol:
        case CallProtocol.tags:
            arguments = {tool.name: tool.argument for tool in tools}
            return TagProtocol(arguments, control_tokens, escapes=escapes)
        case CallProtocol.hermes:
            return HermesProtocol((tool.name for tool in tools), control_tokens)
        case _:
            assert_never(protocol)


def _install(tool: Tool) -> Installed:
    where = f"tool {tool.name}"
    schema = FunctionSchema(tool.schema(), where)
    if schema.name != tool.name:
        raise ValueError(f"{where}: its schema is of {schema.name!r}, expected the same name")
    if tool.argument != JSON_ARGUMENTS and not schema.takes(tool.argument):
        raise ValueError(
            f"{where}: its argument {tool.argument!r}, which takes the text of a tag, is not "
            f"among the schema's properties {sorted(schema.parameters.get('properties', {}))}"
        )
    return Installed(tool=tool, schema=schema, slots=Slots(tool.max_concurrent))

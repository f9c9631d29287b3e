"""The tools of a run and how the policy calls them: `ports.ToolProvider`.

`start` before the first session, `close` at the end. A tool of one's own: subclass
`protocol.Tool` and pass it to `ToolKit`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mega_agentrl.tool.outcomes import OutcomeCounter
from mega_agentrl.tool.python import PythonTool
from mega_agentrl.tool.search import SearchTool
from mega_agentrl.tool.session import TrajectoryTools
from mega_agentrl.tool.tags import TagProtocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import ToolConfig
    from mega_agentrl.tool.protocol import Tool
    from mega_agentrl.types.records import ToolCall, ToolOutcome


class ToolKit:
    """The given tools, called by ARPO's tags."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(f"tools: names {names}, expected each name once")
        self._tags = TagProtocol({tool.name: tool.argument for tool in tools})
        self._outcomes = OutcomeCounter()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._tools)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags after which the engine must stop."""
        return self._tags.stop_strings

    async def start(self) -> None:
        """Start every tool; raises `ValueError` for what is missing, with none left running."""
        started = await asyncio.gather(
            *(tool.start() for tool in self._tools.values()), return_exceptions=True
        )
        failures = [result for result in started if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]

    async def close(self) -> None:
        """End every tool; safe to call twice."""
        await asyncio.gather(*(tool.close() for tool in self._tools.values()))

    def close_now(self) -> None:
        """`close` from synchronous code."""
        for tool in self._tools.values():
            tool.close_now()

    def open(self) -> TrajectoryTools:
        """A new session, not yet created."""
        return TrajectoryTools(self._tools, self._outcomes)

    def parse(self, turn_text: str) -> ToolCall | None:
        """The call that an assistant turn ends in; None where there is none or it is empty."""
        return self._tags.parse(turn_text)

    def render(self, outcome: ToolOutcome) -> str:
        """The text appended to the context for an outcome, its control tags escaped."""
        return self._tags.render(outcome.answer)

    def metrics(self) -> dict[str, float]:
        """Outcomes and latency by tool since the start."""
        return self._outcomes.metrics()


def build_toolkit(config: ToolConfig) -> ToolKit:
    """The configured tools: Python always, search where it has a corpus."""
    tools: list[Tool] = [PythonTool(config.python)]
    if config.search.corpus:
        tools.append(SearchTool(config.search))
    return ToolKit(tools)

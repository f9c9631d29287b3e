"""Loads the user's code and makes the example calls of the tools' schemas, as a run would."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.estimate.preflight.report import PreflightProblem
from mega_agentrl.runtime.inputs import load_user_code
from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline
from mega_agentrl.tool.interface_check import validated_schema
from mega_agentrl.tool.session import SessionLimits
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.tool.base import Tool

STEP_TIMEOUT_S = 30.0
"""Limit of each of start, create, call, release and close, if the tool has no shorter one."""
_KEY = "tool.user_tools_file"


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call that the schema of a tool gives as an example."""

    tool: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments of the call; empty if the tool failed before."""
    status: ToolStatus
    """Result of the call."""
    answer: str
    """Text that the policy would read, or the error."""


def call_user_tools(
    config: TrainConfig,
) -> tuple[list[ExampleCall], list[PreflightProblem], list[str]]:
    """Return all example calls, those that failed as problems, and notes on other tools.

    Raises:
        ValueError: A tool, a reward function or a simulated user cannot be loaded, or two of them
            have the same name.
    """
    calls: list[ExampleCall] = []
    notes: list[str] = []
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]  # the user's code may import it
    user_code = load_user_code(config)
    for server in user_code.mcp_servers:
        names = ", ".join(tool.name for tool in server.tools)
        notes.append(f"tool.mcp: the server {server.config.name} has the tools {names}")
    for tool in user_code.tools:
        examples = validated_schema(tool, f"tool {tool.name}").examples
        if not examples:
            notes.append(f"tool {tool.name} was not called: its parameters have no `examples`")
            continue
        try:
            tool.check_kwargs({})
        except ValueError as error:
            notes.append(f"tool {tool.name} was not called: it needs a prompt's arguments: {error}")
            continue
        calls += asyncio.run(_call_examples(tool, examples))
    problems = [
        PreflightProblem(
            _KEY,
            f"{_KEY}={config.tool.user_tools_file}: tool {call.tool}, the example "
            f"{dict(call.arguments)} of its schema ended in {call.status}: {call.answer}",
        )
        for call in calls
        if call.status is not ToolStatus.ok
    ]
    return calls, problems, notes


async def _call_examples(tool: Tool, examples: list[Mapping[str, Any]]) -> list[ExampleCall]:
    """Make the calls in one session of a toolkit with this tool alone."""
    tool.timeout_s = min(tool.timeout_s or STEP_TIMEOUT_S, STEP_TIMEOUT_S)
    toolkit = ToolKit([tool], limits=SessionLimits(lifecycle_timeout_s=STEP_TIMEOUT_S))
    session = toolkit.open_session()
    calls: list[ExampleCall] = []

    def add(arguments: Mapping[str, Any], status: ToolStatus, answer: str) -> None:
        calls.append(ExampleCall(tool.name, arguments, status, answer))

    try:
        await run_with_deadline(toolkit.start(), STEP_TIMEOUT_S)
        await session.create({})
        for arguments in examples:
            outcome: ToolOutcome = await session.execute(tool.name, arguments)
            status = ToolStatus.user_error if outcome.is_invalid_call else outcome.status
            add(arguments, status, outcome.answer)
        await session.release()
        await run_with_deadline(toolkit.close(), STEP_TIMEOUT_S)
    except DeadlineExceededError as error:
        add({}, ToolStatus.timeout, f"start or close: {error}")
    except ToolSessionError as error:
        add({}, ToolStatus.infra_error, str(error))
    except Exception as error:  # noqa: BLE001 - start and close are the user's code
        add({}, ToolStatus.infra_error, f"start or close: {type(error).__name__}: {error}")
    finally:
        toolkit.close_now()
    return calls

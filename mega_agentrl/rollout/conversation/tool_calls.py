"""Execution of the tool calls of one turn, and truncation of their answers.

Calls run concurrently and are answered in order. Invalid calls and calls beyond the limit of the
trajectory are answered without running. Answers that are too long are truncated with a note, so
that at least one token can be sampled after them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.types.records import InvalidToolCall, ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.tracing import TrajectorySpans
    from mega_agentrl.types.protocols import ToolSession
    from mega_agentrl.types.records import ToolCall

TRUNCATION_NOTE = "... [cut]"
"""Appended to a truncated answer."""

NOT_RUN = "Not run: "
"""Beginning of the answer to a call beyond the limit of calls."""

MAX_CHARS_PER_TOKEN = 64
"""Upper bound of the mean length of a token; longer answers are truncated before tokenization."""


async def run_tool_calls(
    session: ToolSession,
    calls: Sequence[ToolCall | InvalidToolCall],
    spans: TrajectorySpans | None = None,
) -> list[ToolOutcome]:
    """Run calls concurrently and return their outcomes in the order of the calls.

    The outcome of an invalid call is its error message. An exception is raised as itself, not in an
    exception group.
    """
    if len(calls) == 1:
        return [await _run_tool_call(session, calls[0], spans)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_tool_call(session, call, spans)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def call_limit_outcome(call: ToolCall | InvalidToolCall, max_tool_calls: int) -> ToolOutcome:
    """Return the refusal of a call beyond the limit of calls."""
    text = f"{NOT_RUN}no more than {max_tool_calls} calls are allowed."
    if isinstance(call, InvalidToolCall):
        return replace(_bad_call_outcome(call), answer=text)
    return ToolOutcome(tool=call.tool, status=ToolStatus.user_error, answer=text, latency_s=0.0)


def truncate_to_fit(
    outcomes: Sequence[ToolOutcome],
    room: int,
    write: Callable[[Sequence[ToolOutcome]], tuple[list[int], list[str]]],
    num_image_tokens: int = 0,
) -> tuple[list[int], list[str]] | None:
    """Encode outcomes, truncating answers so that at least one more token fits.

    Answers that do not fit are truncated, all to the same number of characters, until the whole
    takes at most half of the room that images leave. Images are never cut.

    Args:
        outcomes: The outcomes of one turn.
        room: Number of tokens left.
        write: Encodes outcomes as token ids and one text per outcome.
        num_image_tokens: Number of tokens of the outcomes' images.

    Returns:
        The result of `write`, or None if even empty answers do not fit.
    """
    room -= num_image_tokens
    limit, num_chars = room - 1, max(len(outcome.answer) for outcome in outcomes)
    if num_chars > MAX_CHARS_PER_TOKEN * max(1, room):
        limit, num_chars = room // 2, MAX_CHARS_PER_TOKEN * max(1, room)
        outcomes = _truncate(outcomes, num_chars)
    token_ids, texts = write(outcomes)
    while (num_text_tokens := len(token_ids) - num_image_tokens) > limit:
        limit = room // 2
        num_chars = min(num_chars - 1, num_chars * limit // num_text_tokens)
        if num_chars < 1:
            return None
        token_ids, texts = write(_truncate(outcomes, num_chars))
    return token_ids, texts


def _truncate(outcomes: Sequence[ToolOutcome], num_chars: int) -> list[ToolOutcome]:
    return [
        outcome
        if len(outcome.answer) <= num_chars
        else replace(outcome, answer=outcome.answer[:num_chars] + TRUNCATION_NOTE)
        for outcome in outcomes
    ]


async def _run_tool_call(
    session: ToolSession, call: ToolCall | InvalidToolCall, spans: TrajectorySpans | None
) -> ToolOutcome:
    if isinstance(call, InvalidToolCall):
        return _bad_call_outcome(call)
    work = session.execute(call.tool, call.arguments)
    return await (work if spans is None else spans.trace_tool_call(call.tool, work))


def _bad_call_outcome(call: InvalidToolCall) -> ToolOutcome:
    return ToolOutcome(
        tool=call.tool,
        status=ToolStatus.user_error,
        answer=call.message,
        latency_s=0.0,
        is_invalid_call=True,
    )

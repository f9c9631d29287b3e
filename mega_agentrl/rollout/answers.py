"""The calls of one turn become answers, and answers become tokens that fit.

Calls run at once and are answered in order. What cannot be read, and what is more than the
trajectory's number of calls allows, is answered without running anything. An answer that is too
long is cut with a note, so that at least one token can be sampled behind it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.types.records import BadCall, ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.spans import PathSpans
    from mega_agentrl.types.ports import ToolSession
    from mega_agentrl.types.records import ToolCall

CUT_NOTE = "... [cut]"

MAX_CHARS_PER_TOKEN = 64
"""No text has more on average: what is longer is cut before anybody tokenizes all of it."""


async def run_calls(
    session: ToolSession, calls: Sequence[ToolCall | BadCall], spans: PathSpans | None = None
) -> list[ToolOutcome]:
    """The outcomes in the order of the calls; raises the first bug itself.

    spans: of the trajectory, None for none.
    """
    if len(calls) == 1:
        return [await _run(session, calls[0], spans)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(session, call, spans)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def refused(call: ToolCall | BadCall, max_calls: int) -> ToolOutcome:
    """The answer to a call beyond the limit; nothing is run."""
    text = f"Not run: no more than {max_calls} calls are allowed."
    if isinstance(call, BadCall):
        return replace(_unreadable(call), answer=text)
    return ToolOutcome(tool=call.tool, status=ToolStatus.user_error, answer=text, latency_s=0.0)


def fit(
    outcomes: Sequence[ToolOutcome],
    room: int,
    write: Callable[[Sequence[ToolOutcome]], tuple[list[int], list[str]]],
) -> tuple[list[int], list[str]] | None:
    """Ids and a text per outcome with room for at least one token behind them; None: no way.

    write: outcomes as ids and texts. What is too long is cut until all of it takes half of the
    room that is left, every answer to the same number of characters.
    """
    limit, num_chars = room - 1, max(len(outcome.answer) for outcome in outcomes)
    if num_chars > MAX_CHARS_PER_TOKEN * max(1, room):
        limit, num_chars = room // 2, MAX_CHARS_PER_TOKEN * max(1, room)
        outcomes = _cut(outcomes, num_chars)
    token_ids, texts = write(outcomes)
    while len(token_ids) > limit:
        limit = room // 2
        num_chars = min(num_chars - 1, num_chars * limit // len(token_ids))
        if num_chars < 1:
            return None
        token_ids, texts = write(_cut(outcomes, num_chars))
    return token_ids, texts


def _cut(outcomes: Sequence[ToolOutcome], num_chars: int) -> list[ToolOutcome]:
    return [
        outcome
        if len(outcome.answer) <= num_chars
        else replace(outcome, answer=outcome.answer[:num_chars] + CUT_NOTE)
        for outcome in outcomes
    ]


async def _run(
    session: ToolSession, call: ToolCall | BadCall, spans: PathSpans | None
) -> ToolOutcome:
    if isinstance(call, BadCall):
        return _unreadable(call)
    work = session.execute(call.tool, call.arguments)
    return await (work if spans is None else spans.tool(call.tool, work))


def _unreadable(call: BadCall) -> ToolOutcome:
    return ToolOutcome(
        tool=call.tool,
        status=ToolStatus.user_error,
        answer=call.message,
        latency_s=0.0,
        bad_call=True,
    )

"""Fetches the tap's measurements from the workers, many requests per round trip.

A round trip waits for the engine's current step. All reads requested meanwhile are answered by the
next round trip, so there are at most as many round trips as steps.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from mega_agentrl.generator.worker_extension import TapColumns

PendingReads = list[tuple[str, asyncio.Future["TapColumns"]]]


class TapReader:
    """Reads measurements by request key, with at most one flushing task at a time."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pending: dict[bool, PendingReads] = {True: [], False: []}
        self._flush_task: asyncio.Task[None] | None = None

    async def take(self, key: str) -> TapColumns:
        """Return the record of a finished request; the worker deletes it."""
        return await self._enqueue(key, take=True)

    async def peek(self, key: str) -> TapColumns:
        """Return the record of a running request up to now."""
        return await self._enqueue(key, take=False)

    def discard(self, key: str) -> None:
        """Delete the record of a request without returning it."""
        self._enqueue(key, take=True).add_done_callback(asyncio.Future.exception)

    def _enqueue(self, key: str, *, take: bool) -> asyncio.Future[TapColumns]:
        answer: asyncio.Future[TapColumns] = asyncio.get_running_loop().create_future()
        self._pending[take].append((key, answer))
        if self._flush_task is None or self._flush_task.done():
            self._flush_task = asyncio.create_task(self._flush())
        return answer

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # include everything that finished in this tick
        while any(self._pending.values()):
            for take in (True, False):
                pending, self._pending[take] = self._pending[take], []
                if pending:
                    await self._flush_batch(pending, take=take)

    async def _flush_batch(self, pending: PendingReads, *, take: bool) -> None:
        keys = [key for key, _ in pending]
        try:
            answers = await self._llm.collective_rpc("tap_read", args=(keys, take))
        except Exception as error:  # noqa: BLE001 - passed on to all callers
            for _, answer in pending:
                if not answer.done():
                    answer.set_exception(error)
            return
        records = next(answer for answer in answers if answer is not None)
        for (_, answer), record in zip(pending, records, strict=True):
            if not answer.done():
                answer.set_result(record)

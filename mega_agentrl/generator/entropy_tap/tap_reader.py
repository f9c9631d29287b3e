"""Fetches the tap's measurements from the workers, many requests per round trip.

A round trip waits for the engine's current step. Requests that ask during one are answered together
by the next, so the number of round trips is bounded by the number of steps.
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
        return await self._request(key, take=True)

    async def peek(self, key: str) -> TapColumns:
        """Return the present record of a running request."""
        return await self._request(key, take=False)

    def discard(self, key: str) -> None:
        """Let the worker delete the record of a request that nobody waits for any more."""
        self._enqueue(key, take=True).add_done_callback(asyncio.Future.exception)

    async def _request(self, key: str, *, take: bool) -> TapColumns:
        return await self._enqueue(key, take=take)

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
        except Exception as error:  # noqa: BLE001 - passed on to everyone who waits
            for _, answer in pending:
                if not answer.done():
                    answer.set_exception(error)
            return
        records = next(answer for answer in answers if answer is not None)
        for (_, answer), record in zip(pending, records, strict=True):
            if not answer.done():
                answer.set_result(record)

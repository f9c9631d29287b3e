"""Fetches the tap's measurements from the workers, many requests per round trip.

A round trip waits for the engine's current step. Requests that ask while one is under way are
answered together by the next, so the number of round trips is bounded by the number of steps.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from mega_agentrl.generator.worker_extension import PlainRecord

Waiting = list[tuple[str, asyncio.Future["PlainRecord"]]]


class TapReader:
    """Consumes: keys of requests. Produces: their records. One flushing task at a time."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._waiting: dict[bool, Waiting] = {True: [], False: []}
        self._flusher: asyncio.Task[None] | None = None

    async def take(self, key: str) -> PlainRecord:
        """The record of a finished request; the worker forgets it."""
        return await self._ask(key, take=True)

    async def peek(self, key: str) -> PlainRecord:
        """What there is of a running request."""
        return await self._ask(key, take=False)

    def forget(self, key: str) -> None:
        """Let the worker drop what it has of a request nobody waits for any more."""
        self._enqueue(key, take=True).add_done_callback(asyncio.Future.exception)

    async def _ask(self, key: str, *, take: bool) -> PlainRecord:
        return await self._enqueue(key, take=take)

    def _enqueue(self, key: str, *, take: bool) -> asyncio.Future[PlainRecord]:
        answer: asyncio.Future[PlainRecord] = asyncio.get_running_loop().create_future()
        self._waiting[take].append((key, answer))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return answer

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # everything that finished in this tick comes along
        while any(self._waiting.values()):
            for take in (True, False):
                waiting, self._waiting[take] = self._waiting[take], []
                if waiting:
                    await self._answer(waiting, take=take)

    async def _answer(self, waiting: Waiting, *, take: bool) -> None:
        keys = [key for key, _ in waiting]
        try:
            answers = await self._llm.collective_rpc("tap_read", args=(keys, take))
        except Exception as error:  # noqa: BLE001 - handed on to everyone who waits
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        records = next(answer for answer in answers if answer is not None)
        for (_, answer), record in zip(waiting, records, strict=True):
            if not answer.done():
                answer.set_result(record)

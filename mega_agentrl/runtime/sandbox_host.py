"""The far end of the sandboxes: a pool and its sessions in an actor of their own, on any node.

Every call has a number that the driver chose. Ray may deliver the calls of one driver out of
order, so the order is kept here: `cancel` of a number that has not come yet refuses it when it
comes, and a session refuses a call older than one it has seen. A call that makes a session
gives it its number as a name; cancelling it ends the session too, however far it got.

All calls are coroutines of one event loop and wait only in the pool, which is where the queue
is. Who lives when, and which host gets a call, is the driver's side (`sandbox_keeper`,
`sandbox_group`).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.runtime.remote import redirect_output
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.sandbox.session import infra_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mega_agentrl.config.sandbox_schema import PythonToolConfig
    from mega_agentrl.sandbox.session import SandboxSession
    from mega_agentrl.sandbox.supervisor import SandboxResult

_NUM_REMEMBERED = 4096
"""Cancelled numbers that are kept for a call still under way."""

_CANCELLED = "the call was cancelled"


class SandboxHost:
    """One `SandboxPool` on its node; `start` before the first call."""

    def __init__(self, config: PythonToolConfig, log_file: str) -> None:
        redirect_output(Path(log_file))
        self._pool = SandboxPool(config)
        self._sessions: dict[int, SandboxSession] = {}
        self._newest: dict[int, int] = {}  # call by session
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: dict[int, None] = {}  # in order of arrival

    async def where(self) -> tuple[str, str]:
        """The node's id, and words for people: its address and this process's id."""
        node = ray.get_runtime_context().get_node_id()
        return node, f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    async def start(self) -> None:
        """Warm the sandboxes; raises `ValueError` where this node cannot isolate them."""
        await self._pool.start()

    async def ping(self) -> int:
        """Sandboxes lost here so far; that it answers says that the host is well."""
        return self._pool.num_replaced

    async def until_ended(self) -> None:
        """Never answers: the caller learns at once when this process dies."""
        await asyncio.Event().wait()

    async def run(self, number: int, code: str, timeout_s: float | None) -> SandboxResult:
        """See `SandboxPool.run`."""
        return await self._answer(number, partial(self._pool.run, code, timeout_s))

    async def open(self, number: int) -> str:
        """A new session of that name; else why it cannot be had."""
        return await self._make(number, self._pool.open)

    async def run_in(
        self, number: int, session: int, code: str, timeout_s: float | None
    ) -> SandboxResult:
        """See `SandboxSession.run`."""
        if session not in self._sessions:
            return infra_error("the session is closed")
        if number < self._newest[session]:
            return infra_error("a later call has overtaken this one; it did not run")
        self._newest[session] = number
        run = self._sessions[session].run
        return await self._answer(number, partial(run, code, timeout_s))

    async def fork(self, number: int, session: int) -> str:
        """A session named `number` that goes on from the other's state; else why it cannot."""
        if session not in self._sessions:
            return "the session cannot be forked: it is closed"
        return await self._make(number, self._sessions[session].fork)

    async def close_session(self, session: int) -> None:
        """End a session; safe for one that is not there."""
        self._newest.pop(session, None)
        if (ended := self._sessions.pop(session, None)) is not None:
            await ended.close()

    async def cancel(self, number: int) -> None:
        """End a call at once: it is running, has not come yet, or has made its session."""
        if (task := self._running.get(number)) is not None:
            task.cancel()
        elif number in self._sessions:
            await self.close_session(number)
        else:
            self._cancelled[number] = None
            if len(self._cancelled) > _NUM_REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]

    async def close(self) -> None:
        """End every sandbox; running calls become `infra_error`."""
        await self._pool.close()

    async def _make(
        self, number: int, making: Callable[[], Coroutine[Any, Any, SandboxSession]]
    ) -> str:
        # The session is noted within the task: once that is done, `cancel` finds it.
        async def make() -> str:
            try:
                session = await making()
            except RuntimeError as error:
                return str(error)
            self._sessions[number] = session
            self._newest[number] = number
            return ""

        made: str | None = await self._finish(number, make)
        return _CANCELLED if made is None else made

    async def _answer(
        self, number: int, call: Callable[[], Coroutine[Any, Any, SandboxResult]]
    ) -> SandboxResult:
        result: SandboxResult | None = await self._finish(number, call)
        return infra_error(_CANCELLED) if result is None else result

    async def _finish(self, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What the work gives; None where it was cancelled."""
        if number in self._cancelled:
            del self._cancelled[number]
            return None
        task = asyncio.ensure_future(work())
        self._running[number] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._running[number]
        return None if task.cancelled() else task.result()

"""A sandbox host: a `SandboxPool` and its sessions in a Ray actor on any node.

Every call carries an id that the driver chose. Ray may deliver the calls of one driver out of
order. A call whose `cancel` has arrived before it does not run, and a session refuses a call that
is older than its latest one. The id of the call that creates a session becomes the id of the
session; cancelling that call also ends the session.

All calls are coroutines on one event loop and wait only in the pool, which holds the queue.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.runtime.remote_calls import redirect_output
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.sandbox.session import infra_error_result

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mega_agentrl.config.sections.tools import PythonToolConfig
    from mega_agentrl.sandbox.client import SandboxResult
    from mega_agentrl.sandbox.session import SandboxSession

_MAX_CANCELLED_IDS = 4096
"""Maximum number of cancelled ids remembered for calls that are still on their way."""

_CANCELLED_MESSAGE = "the call was cancelled"


class SandboxHostActor:
    """One `SandboxPool` on its node; call `start` before anything else."""

    def __init__(self, config: PythonToolConfig, log_file: str) -> None:
        redirect_output(Path(log_file))
        self._pool = SandboxPool(config)
        self._sessions: dict[int, SandboxSession] = {}
        self._latest_call_ids: dict[int, int] = {}  # call by session
        self._running_tasks: dict[int, asyncio.Task[Any]] = {}
        self._cancelled_call_ids: dict[int, None] = {}  # in order of arrival

    async def location(self) -> tuple[str, str]:
        """Return the node's id, and its address with the process id for messages."""
        node = ray.get_runtime_context().get_node_id()
        return node, f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    async def start(self) -> None:
        """Start the sandboxes.

        Raises:
            ValueError: This node cannot isolate sandboxes.
        """
        await self._pool.start()

    async def ping(self) -> int:
        """Return the number of sandboxes lost so far; an answer shows that the host is alive."""
        return self._pool.num_replaced

    async def wait_for_death(self) -> None:
        """Never return: a pending call fails as soon as this process dies."""
        await asyncio.Event().wait()

    async def run(self, call_id: int, code: str, timeout_s: float | None) -> SandboxResult:
        """Run code without a session, like `SandboxPool.run`."""
        return await self._run_call(call_id, partial(self._pool.run, code, timeout_s))

    async def open(self, call_id: int) -> str:
        """Open a session with id `call_id`; return an error message, empty on success."""
        return await self._create_session(call_id, self._pool.open)

    async def run_in_session(
        self, call_id: int, session: int, code: str, timeout_s: float | None
    ) -> SandboxResult:
        """Run code in a session, like `SandboxSession.run`."""
        if session not in self._sessions:
            return infra_error_result("the session is closed")
        if call_id < self._latest_call_ids[session]:
            return infra_error_result("a later call has overtaken this one; it did not run")
        self._latest_call_ids[session] = call_id
        run = self._sessions[session].run
        return await self._run_call(call_id, partial(run, code, timeout_s))

    async def fork(self, call_id: int, session: int) -> str:
        """Fork a session into one with id `call_id`; return an error message, empty on success."""
        if session not in self._sessions:
            return "the session cannot be forked: it is closed"
        return await self._create_session(call_id, self._sessions[session].fork)

    async def close_session(self, session: int) -> None:
        """Close a session; does nothing if there is none with this id."""
        self._latest_call_ids.pop(session, None)
        if (closed_session := self._sessions.pop(session, None)) is not None:
            await closed_session.close()

    async def cancel(self, call_id: int) -> None:
        """Cancel a call that is running, has not arrived yet or has created a session."""
        if (task := self._running_tasks.get(call_id)) is not None:
            task.cancel()
        elif call_id in self._sessions:
            await self.close_session(call_id)
        else:
            self._cancelled_call_ids[call_id] = None
            if len(self._cancelled_call_ids) > _MAX_CANCELLED_IDS:
                del self._cancelled_call_ids[next(iter(self._cancelled_call_ids))]

    async def close(self) -> None:
        """Close the pool; running calls end with `infra_error`."""
        await self._pool.close()

    async def _create_session(
        self, call_id: int, create: Callable[[], Coroutine[Any, Any, SandboxSession]]
    ) -> str:
        # The task itself stores the session: as soon as it is done, `cancel` finds it.
        async def make() -> str:
            try:
                session = await create()
            except RuntimeError as error:
                return str(error)
            self._sessions[call_id] = session
            self._latest_call_ids[call_id] = call_id
            return ""

        error_message: str | None = await self._run_cancellable(call_id, make)
        return _CANCELLED_MESSAGE if error_message is None else error_message

    async def _run_call(
        self, call_id: int, call: Callable[[], Coroutine[Any, Any, SandboxResult]]
    ) -> SandboxResult:
        result: SandboxResult | None = await self._run_cancellable(call_id, call)
        return infra_error_result(_CANCELLED_MESSAGE) if result is None else result

    async def _run_cancellable(
        self, call_id: int, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Run the work as a task; return its result, or None if it was cancelled."""
        if call_id in self._cancelled_call_ids:
            del self._cancelled_call_ids[call_id]
            return None
        task = asyncio.ensure_future(work())
        self._running_tasks[call_id] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._running_tasks[call_id]
        return None if task.cancelled() else task.result()

"""A stateful interpreter, one per trajectory, which is forked when the trajectory is.

**Calls.** Between calls the interpreter is stopped. Processes that a call started end with the
call; threads are only stopped. A call that is cancelled, runs past its timeout or ends the process
(`os._exit`, a crash) loses the state: the next call starts from an empty interpreter and says so in
its output (`STATE_LOST_NOTE`) and in `state_lost`. If the sandbox itself fails, this call and all
later ones are `infra_error`.

**Forks.** A fork starts with the current variables, files, working folder and random generators;
neither side sees later changes of the other. Both sides share files, memory maps and sockets that
were open at the fork, with their positions. Threads end in the fork and, from its next call on, in
the parent too.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.client import (
    CancelToken,
    RequestRefusedError,
    SandboxLostError,
    SandboxResult,
)
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, Self, TypeVar

    from mega_agentrl.sandbox.cgroup import Cgroup
    from mega_agentrl.sandbox.client import GuestConnection, Sandbox

    T = TypeVar("T")

STATE_LOST_NOTE = "[The interpreter was restarted: earlier variables and files are lost.]"


class SessionGroup:
    """The sessions that descend from one session; they share a sandbox and a cgroup."""

    def __init__(
        self, sandbox: Sandbox, cgroup: Cgroup, on_empty: Callable[[SessionGroup], None]
    ) -> None:
        self.sandbox = sandbox
        self._cgroup = cgroup
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._num_sessions = 0

    def add_session(self) -> None:
        """Count one more session."""
        with self._lock:
            self._num_sessions += 1

    def remove_session(self) -> None:
        """Count one session less; the last one calls `on_empty`."""
        with self._lock:
            self._num_sessions -= 1
            empty = self._num_sessions == 0
        if empty:
            self._on_empty(self)

    def close(self) -> None:
        """Remove the cgroup; blocks until its last process has ended."""
        self._cgroup.close()


class SandboxSession:
    """An interpreter with state, for one call, fork or close at a time.

    Sessions are created by `SandboxPool.open` and `fork`.

    Args:
        connection: The channel to the session's interpreter.
        group: The sessions that share its cgroup.
        run_in_thread: Runs a function in a thread of the pool.
        timeout_s: Default timeout of a call.
    """

    def __init__(
        self,
        connection: GuestConnection,
        group: SessionGroup,
        run_in_thread: Callable[..., Awaitable[Any]],
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self._group = group
        self._run_in_thread = run_in_thread
        self._timeout_s = timeout_s
        self._failure_reason = ""
        self._closed = False
        group.add_session()

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code`; errors of the code are in the result. Cancelling ends the call at once.

        Args:
            code: What to run.
            timeout_s: Limit of the call, by default that of the session.
        """
        return await self._run(code, timeout_s, "default")

    async def _run(self, code: str, timeout_s: float | None, kind: str) -> SandboxResult:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        cancel_token = CancelToken()
        try:
            result: SandboxResult = await self._run_in_thread(
                self._run_blocking, code, limit_s, cancel_token, kind
            )
        except asyncio.CancelledError:
            cancel_token.cancel()
            raise
        except SandboxLostError as error:
            return infra_error_result(str(error))
        return result

    async def fork(self) -> Self:
        """Return a session that continues from this one's state.

        Raises:
            RuntimeError: The sandbox has lost the state, the session is closed, or forks are nested
                too deep (namespaces nest 32 deep, and the machine's own containers use some).
                Unless the sandbox is lost, this session is unchanged.
        """
        if self._closed or self._failure_reason:
            raise RuntimeError(
                f"the session cannot be forked: {self._failure_reason or 'it is closed'}"
            )
        forking = asyncio.ensure_future(self._run_in_thread(self._connection.fork))
        try:
            connection: GuestConnection = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_close_abandoned_fork)
            raise
        except SandboxLostError as error:
            self._mark_state_lost(str(error))
            raise RuntimeError(f"the session cannot be forked: {error}") from error
        except RequestRefusedError as error:
            raise RuntimeError(
                f"the session cannot be forked: {error}. Probable cause of 'No space left on "
                "device' or 'Invalid argument': forks of forks are nested too deep"
            ) from error
        return type(self)(connection, self._group, self._run_in_thread, self._timeout_s)

    async def close(self) -> None:
        """End the interpreter. Safe to call twice."""
        self.close_now()

    def close_now(self) -> None:
        """Close from synchronous code."""
        if self._closed:
            return
        self._closed = True
        self._connection.shutdown()
        self._group.remove_session()

    def _run_blocking(
        self, code: str, timeout_s: float, cancel_token: CancelToken, kind: str
    ) -> SandboxResult:
        if self._closed or self._failure_reason:
            return infra_error_result(self._failure_reason or "the session is closed")
        try:
            result = self._connection.call(code, timeout_s, cancel_token, kind)
        except RequestRefusedError as error:
            return infra_error_result(str(error))
        except SandboxLostError as error:
            self._mark_state_lost(str(error))
            return infra_error_result(str(error))
        if result.state_lost:
            result = replace(result, output=f"{STATE_LOST_NOTE}\n{result.output}".strip())
        return result

    def _mark_state_lost(self, reason: str) -> None:
        self._failure_reason = f"the interpreter's state is lost: {reason}"


def _close_abandoned_fork(forking: asyncio.Future[GuestConnection]) -> None:
    """Close a fork whose caller was cancelled; the sandbox ends it when its channel closes."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().close()


def infra_error_result(reason: str) -> SandboxResult:
    """Return the result of a call that failed because of the infrastructure."""
    return SandboxResult(status=ToolStatus.infra_error, output=reason, latency_s=0.0)

"""A stateful interpreter, one for each trajectory; forked where the trajectory is.

Between calls it is stopped and nothing else of it runs: what a call started ends with it
(threads are only stopped). A call past its deadline, or cancelled, or one whose process ends
(`os._exit`, a crash), takes the state with it: the next call begins afresh, says so in its
output (`LOST_NOTE`) and in `state_lost`. Where the sandbox itself fails, the state is gone by
our fault: this call and all later ones are `infra_error`, nothing is run again.

Fork: variables, files, the working folder and the random generators are as they are now;
neither side sees what the other does later. Not separated are files (also memory maps and
sockets) that were open at the fork: both sides go on with the same open file, its position
included. Threads end in the child and, from its next call on, in the parent too.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.supervisor import (
    RefusedError,
    SandboxLostError,
    SandboxResult,
    Ticket,
)
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    from mega_agentrl.sandbox.cgroup import Cgroup
    from mega_agentrl.sandbox.supervisor import Line, Sandbox

    T = TypeVar("T")

LOST_NOTE = "[The interpreter was restarted: earlier variables and files are lost.]"


class Family:
    """The sessions that come from one trajectory's: they share a sandbox and a cgroup."""

    def __init__(
        self, sandbox: Sandbox, cgroup: Cgroup, on_empty: Callable[[Family], None]
    ) -> None:
        self.sandbox = sandbox
        self._cgroup = cgroup
        self._on_empty = on_empty
        self._lock = threading.Lock()
        self._num_sessions = 0

    def enter(self) -> None:
        """One session more."""
        with self._lock:
            self._num_sessions += 1

    def leave(self) -> None:
        """One session less; the last one tells the pool."""
        with self._lock:
            self._num_sessions -= 1
            empty = self._num_sessions == 0
        if empty:
            self._on_empty(self)

    def close(self) -> None:
        """Remove the cgroup; blocks until its last process has ended."""
        self._cgroup.close()


class SandboxSession:
    """One interpreter with a memory. One call, fork or close at a time."""

    def __init__(
        self,
        line: Line,
        family: Family,
        work: Callable[..., Awaitable[Any]],
        cut: Callable[[SandboxResult], SandboxResult],
        timeout_s: float,
    ) -> None:
        """Made by `SandboxPool.open` and `fork`. work: runs a function in a pool's thread."""
        self._line = line
        self._family = family
        self._work = work
        self._cut = cut
        self._timeout_s = timeout_s
        self._failure = ""
        self._closed = False
        family.enter()

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code`; raises nothing for what the code does. Cancelling ends it at once."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        ticket = Ticket()
        try:
            result: SandboxResult = await self._work(self._run, code, limit_s, ticket)
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        except SandboxLostError as error:
            return infra_error(str(error))
        return result

    async def fork(self) -> SandboxSession:
        """A session that goes on from this one's state.

        Raises `RuntimeError` where it cannot be had: the state is lost by our fault, the
        session is closed, or it lies too deep (namespaces nest 32 deep, a few are used up by
        the machine's own containers). The session itself is as before then.
        """
        if self._closed or self._failure:
            raise RuntimeError(f"the session cannot be forked: {self._failure or 'it is closed'}")
        forking = asyncio.ensure_future(self._work(self._line.fork))
        try:
            line: Line = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_hang_up)
            raise
        except SandboxLostError as error:
            self._fail(str(error))
            raise RuntimeError(f"the session cannot be forked: {error}") from error
        except RefusedError as error:
            raise RuntimeError(
                f"the session cannot be forked: {error}. Where it says 'No space left on device' "
                "or 'Invalid argument', forks of forks are nested too deep"
            ) from error
        return SandboxSession(line, self._family, self._work, self._cut, self._timeout_s)

    async def close(self) -> None:
        """End the interpreter; safe twice."""
        self.close_now()

    def close_now(self) -> None:
        """The same from synchronous code."""
        if self._closed:
            return
        self._closed = True
        self._line.hang_up()
        self._family.leave()

    def _run(self, code: str, limit_s: float, ticket: Ticket) -> SandboxResult:
        if self._closed or self._failure:
            return infra_error(self._failure or "the session is closed")
        try:
            result = self._line.call(code, limit_s, ticket)
        except RefusedError as error:
            return infra_error(str(error))
        except SandboxLostError as error:
            self._fail(str(error))
            return infra_error(str(error))
        result = self._cut(result)
        if result.state_lost:
            result = replace(result, output=f"{LOST_NOTE}\n{result.output}".strip())
        return result

    def _fail(self, why: str) -> None:
        self._failure = f"the interpreter's state is lost: {why}"


def _hang_up(forking: asyncio.Future[Line]) -> None:
    """Nobody wants the fork any more: its sandbox ends it when its channel closes."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().close()


def infra_error(why: str) -> SandboxResult:
    """A call that failed by our fault."""
    return SandboxResult(status=ToolStatus.infra_error, output=why, latency_s=0.0)

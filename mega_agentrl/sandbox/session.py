"""A stateful interpreter, one per trajectory, which is forked when the trajectory is.

**Calls.** Between calls the interpreter is stopped. Processes that a call started end with the
call; threads are only stopped. A call that is cancelled, runs past its timeout or ends the process
(`os._exit`, a crash) loses the state: the next call starts from an empty interpreter and says so in
its output (`STATE_LOST_NOTE`) and in `state_lost`.

**Losses.** A session is lost for good if its supervisor ends, or the first process of a workspace.
Nothing runs in it any more: a new workspace would lack what the policy has done to the old one, and
a command that rates it might succeed. Who is to blame is decided in one place (`_lose`), so that a
policy cannot choose to have its attempt left out of the training: it has caused every loss during a
call once its code has run, and every one after processes of the session were killed for memory.
`user_error` is the status of this call and of all later ones then. If the whole sandbox has ended,
which no session can cause, or the loss came between two calls, they are `infra_error`.

**Forks.** A fork starts with the current variables, files, working folder and random generators;
neither side sees later changes of the other. Both sides share files, memory maps and sockets that
were open at the fork, with their positions. Threads end in the fork and, from its next call on, in
the parent too.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, replace
from functools import partial
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
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Why a session is lost, and the status of its calls."""

    reason: str
    status: ToolStatus


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

    @property
    def num_oom_kills(self) -> int:
        """Number of processes of the sessions that were killed for memory so far."""
        return self._cgroup.num_oom_kills

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
        self._loss: _Loss | None = None
        self._has_run_policy = False
        self._num_oom_kills = group.num_oom_kills
        self._closed = False
        group.add_session()

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code`; errors of the code are in the result. Cancelling ends the call at once.

        Args:
            code: What to run.
            timeout_s: Limit of the call, by default that of the session.
        """
        return await self._run(code, timeout_s, "default")

    async def _run(
        self, code: str, timeout_s: float | None, kind: str, *, is_policy: bool = True
    ) -> SandboxResult:
        """Run a call; `is_policy` says whether the policy has chosen what runs."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        cancel_token = CancelToken()
        try:
            result: SandboxResult = await self._run_in_thread(
                self._run_blocking, code, limit_s, cancel_token, kind, is_policy
            )
        except asyncio.CancelledError:
            cancel_token.cancel()
            raise
        except SandboxLostError as error:
            return infra_error_result(str(error))
        return result

    async def fork(self) -> Self:
        """Return a session that continues from this one's state.

        The fork of a session that the policy has lost is lost as well.

        Raises:
            RuntimeError: The sandbox has lost the state, the session is closed, or forks are nested
                too deep (namespaces nest 32 deep, and the machine's own containers use some).
                Unless the sandbox is lost, this session is unchanged.
        """
        connection = self._connection
        if self._closed or (self._loss and self._loss.status is ToolStatus.infra_error):
            reason = self._loss.reason if self._loss else "it is closed"
            raise RuntimeError(f"the session cannot be forked: {reason}")
        if self._loss is None:
            connection = await self._fork_connection()
        child = type(self)(connection, self._group, self._run_in_thread, self._timeout_s)
        child._loss, child._has_run_policy = self._loss, self._has_run_policy
        return child

    async def _fork_connection(self) -> GuestConnection:
        forking = asyncio.ensure_future(self._run_in_thread(self._connection.fork))
        try:
            connection: GuestConnection = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_close_abandoned_fork)
            raise
        except SandboxLostError as error:
            await self._run_in_thread(partial(self._lose, str(error), is_in_call=True))
            raise RuntimeError(f"the session cannot be forked: {error}") from error
        except RequestRefusedError as error:
            raise RuntimeError(
                f"the session cannot be forked: {error}. Probable cause of 'No space left on "
                "device' or 'Invalid argument': forks of forks are nested too deep"
            ) from error
        return connection

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
        self, code: str, timeout_s: float, cancel_token: CancelToken, kind: str, is_policy: bool
    ) -> SandboxResult:
        if self._closed:
            return infra_error_result("the session is closed")
        if self._loss is not None:
            return _result_without_run(self._loss)
        try:
            result = self._connection.call(code, timeout_s, cancel_token, kind)
        except RequestRefusedError as error:
            # Once its code has run, the policy can keep the session from going on.
            is_ours = cancel_token.cancelled or not self._has_run_policy
            status = ToolStatus.infra_error if is_ours else ToolStatus.user_error
            return _result_without_run(_Loss(str(error), status))
        except SandboxLostError as error:
            if self._closed:  # which has ended the call
                return infra_error_result("the session is closed")
            self._has_run_policy |= is_policy and error.may_have_run
            return _result_without_run(self._lose(str(error), is_in_call=True))
        self._has_run_policy |= is_policy
        if self._is_final_loss(result):
            loss = self._lose(result.output, is_in_call=not result.state_lost)
            return replace(result, status=loss.status, output=loss.reason)
        if result.state_lost:
            result = replace(result, output=f"{STATE_LOST_NOTE}\n{result.output}".strip())
        return result if result.status is ToolStatus.ok else self._with_oom_kills(result)

    def _is_final_loss(self, result: SandboxResult) -> bool:
        """Return whether nothing can run in the session after this call."""
        return False

    def _with_oom_kills(self, result: SandboxResult) -> SandboxResult:
        """Return the result of a call that failed, with the processes killed for memory."""
        number, self._num_oom_kills = self._num_oom_kills, self._group.num_oom_kills
        number = self._num_oom_kills - number
        if number <= 0:
            return result
        _logger.info("a session: %s", oom_note(number))
        note = f"[{oom_note(number)}.]"
        return replace(result, output=f"{result.output}\n{note}".strip(), num_oom_kills=number)

    def _lose(self, reason: str, *, is_in_call: bool) -> _Loss:
        """Note that the session is lost, and who is to blame.

        Args:
            reason: What was seen.
            is_in_call: Whether the loss came during a call or a fork, not between two.
        """
        number = self._group.num_oom_kills
        by_policy = self._has_run_policy and (is_in_call or number > 0)
        by_policy = by_policy and not self._group.sandbox.has_ended()
        text = f"the state of the session is lost: {reason}"
        if number:
            text += f"; {oom_note(number)}"
        status = ToolStatus.user_error if by_policy else ToolStatus.infra_error
        self._loss = _Loss(text, status)
        _logger.log(logging.INFO if by_policy else logging.WARNING, "%s: %s", status, text)
        return self._loss


def _close_abandoned_fork(forking: asyncio.Future[GuestConnection]) -> None:
    """Close a fork whose caller was cancelled; the sandbox ends it when its channel closes."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().close()


def oom_note(number: int) -> str:
    """Return the words that say how many processes were killed for memory."""
    return f"the memory limit was reached, killed processes: {number}"


def _result_without_run(loss: _Loss) -> SandboxResult:
    return SandboxResult(status=loss.status, output=loss.reason, latency_s=0.0)


def infra_error_result(reason: str) -> SandboxResult:
    """Return the result of a call that failed because of the infrastructure."""
    return SandboxResult(status=ToolStatus.infra_error, output=reason, latency_s=0.0)

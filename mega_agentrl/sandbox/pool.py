"""A pool of warm sandboxes behind two coroutines: `run`, a call in a fresh interpreter, and
`open`, an interpreter with a memory (`session`).

`run` consumes code and produces a typed `SandboxResult`; it waits for a free sandbox and for
the call, whose deadline starts when the sandbox takes it; it is unblocked by the answer, the
deadline, cancellation (which ends the call at once) or `close`. It works from any event
loop, because each of `config.workers` threads serves one call at a time and talks to its
sandbox by blocking reads with deadlines.

A stateless sandbox serves one call at a time. A stateful one serves many sessions, each in
namespaces of its own (processes, files, network, IPC, and with them its own count of
processes) and, where control groups can be had, in a group of its own: a session that is
killed or exhausted takes nothing from the others. Only so does an idle session cost a few
MiB instead of a warm interpreter of its own.

A sandbox that dies or does not answer is replaced when the next call needs one. Its call is
repeated once, and only where the code certainly did not run: nothing runs twice silently.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import Isolation, PythonMode
from mega_agentrl.sandbox.cgroup import remove_leftovers
from mega_agentrl.sandbox.host_user import take_user
from mega_agentrl.sandbox.inner.settings import Settings
from mega_agentrl.sandbox.isolation import check_isolation
from mega_agentrl.sandbox.session import Family, SandboxSession, infra_error
from mega_agentrl.sandbox.supervisor import (
    RefusedError,
    Sandbox,
    SandboxLostError,
    SandboxResult,
    Ticket,
)
from mega_agentrl.sandbox.syscall_filter import encoded_filter
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.sandbox_schema import PythonToolConfig

OUTPUT_CHARS = 4000
"""An answer beyond it is cut with a note: about 1,000 tokens, more than a policy reads."""

_LEAST_CPU_S = 1.0
"""Of the kernel's limit, which counts whole seconds."""

_ATTEMPTS = 2
_logger = logging.getLogger(__name__)


class SandboxPool:
    """`config.workers` sandboxes; `start` before the first `run` or `open`."""

    def __init__(self, config: PythonToolConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._all: set[Sandbox] = set()
        self._families: set[Family] = set()
        self._closed = False
        self._num_replaced = 0
        self._settings = Settings()

    @property
    def num_replaced(self) -> int:
        """Sandboxes lost so far."""
        return self._num_replaced

    async def start(self) -> None:
        """Warm every sandbox; raises `ValueError` where isolation is not to be had."""
        await asyncio.to_thread(self._prepare)
        loop = asyncio.get_running_loop()
        started = [
            loop.run_in_executor(self._threads, self._new) for _ in range(self._config.workers)
        ]
        results = await asyncio.gather(*started, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.close()
            if not isinstance(failures[0], SandboxLostError):
                raise failures[0]
            raise ValueError(
                f"tool.python: a sandbox did not start ({failures[0]}); expected a warm "
                "interpreter. Probable cause: nested user namespaces or (mode=stateful) seccomp "
                "user notification are not allowed here, or a module of "
                f"tool.python.preload={list(self._config.preload)} cannot be imported"
            ) from failures[0]
        with self._lock:
            self._idle += [one for one in results if isinstance(one, Sandbox)]

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; raises nothing for what the code does."""
        if self._config.mode is PythonMode.stateful:
            return await self._run_in_session(code, timeout_s)
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        ticket = Ticket()
        try:
            result: SandboxResult = await self._work(self._run, code, limit_s, ticket)
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        except SandboxLostError as error:
            return infra_error(str(error))
        return result

    async def open(self) -> SandboxSession:
        """A new stateful interpreter.

        Raises `ValueError` for a pool in another mode, `RuntimeError` (`SandboxLostError`)
        where none can be had.
        """
        if self._config.mode is not PythonMode.stateful:
            raise ValueError(
                f"tool.python.mode={self._config.mode}: expected stateful for a session"
            )
        opening = asyncio.ensure_future(self._work(self._open))
        try:
            session: SandboxSession = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_result)
            raise
        return session

    async def close(self) -> None:
        """End every sandbox and wait for the threads."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """The same from synchronous code; running calls become `infra_error` at once."""
        with self._lock:
            self._closed = True
            sandboxes = list(self._all)
            self._idle.clear()
        for sandbox in sandboxes:
            sandbox.kill()
        self._threads.shutdown(wait=True)  # what still waits for a thread fails at once
        for sandbox in self._all:
            sandbox.close()
        for family in tuple(self._families):
            family.close()

    def _prepare(self) -> None:
        config = self._config
        walled = config.isolation is not Isolation.none
        stateful = config.mode is PythonMode.stateful
        if walled:
            remove_leftovers()
            user = take_user()
            try:
                check_isolation(user.number if user else None)
            finally:
                if user is not None:
                    user.close()
        else:
            _logger.warning(
                "tool.python.isolation=none: THE POLICY'S CODE RUNS WITHOUT ANY ISOLATION, with "
                "the rights of this process on this machine. For trusted code only."
            )
        self._settings = Settings(
            preload=tuple(config.preload),
            filter=encoded_filter(stateful=stateful) if walled else "",
            stateful=stateful,
            walled=walled,
            memory_mib=config.memory_mib,
            # More CPU than wall time is several threads, of which a call is worth one.
            cpu_s=max(_LEAST_CPU_S, config.timeout_s),
            output_bytes=4 * OUTPUT_CHARS,  # the longest UTF-8 sequence is 4 bytes
        )

    async def _work(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in one of the threads."""
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(self._threads, function, *arguments)
        except RuntimeError as error:
            if not self._closed:
                raise
            raise SandboxLostError("the sandbox pool is closed", started=False) from error
        return await running

    async def _run_in_session(self, code: str, timeout_s: float | None) -> SandboxResult:
        try:
            session = await self.open()
        except SandboxLostError as error:
            return infra_error(str(error))
        try:
            return await session.run(code, timeout_s)
        finally:
            await session.close()

    def _run(self, code: str, timeout_s: float, ticket: Ticket) -> SandboxResult:
        lost = ""
        for _ in range(_ATTEMPTS):
            try:
                sandbox = self._take()
            except SandboxLostError as error:
                lost = str(error)
                continue
            try:
                result = sandbox.call(code, timeout_s, ticket)
            except RefusedError as error:  # cancelled before it began
                self._give_back(sandbox)
                return infra_error(str(error))
            except SandboxLostError as error:
                lost = str(error)
                self._discard(sandbox)
                if error.started:
                    break
                continue
            self._give_back(sandbox)
            return self._cut(result)
        return infra_error(lost)

    def _open(self) -> SandboxSession:
        lost = SandboxLostError("no sandbox", started=False)
        for _ in range(_ATTEMPTS):
            try:
                sandbox = self._take()
            except SandboxLostError as error:
                lost = error
                continue
            try:
                line, cgroup = sandbox.open()
            except SandboxLostError as error:
                lost = error
                self._discard(sandbox)
                continue
            family = Family(sandbox, cgroup, self._end_family)
            with self._lock:
                self._families.add(family)
                sandbox.num_sessions += 1
            self._give_back(sandbox)
            return SandboxSession(line, family, self._work, self._cut, self._config.timeout_s)
        raise lost

    def _end_family(self, family: Family) -> None:
        with self._lock:
            family.sandbox.num_sessions -= 1
            closed = self._closed
        if not closed:
            self._threads.submit(self._close_family, family)

    def _close_family(self, family: Family) -> None:
        family.close()
        with self._lock:
            self._families.discard(family)

    def _take(self) -> Sandbox:
        with self._lock:
            if self._idle:
                least = min(self._idle, key=lambda one: one.num_sessions)
                self._idle.remove(least)
                return least
        return self._new()

    def _give_back(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._idle.append(sandbox)

    def _new(self) -> Sandbox:
        if self._closed:
            raise SandboxLostError("the sandbox pool is closed", started=False)
        sandbox = Sandbox(self._settings, total_memory_mib=self._config.total_memory_mib)
        with self._lock:
            self._all.add(sandbox)
            closed = self._closed
        if closed:  # it was started while `close_now` collected the others
            sandbox.kill()
        return sandbox

    def _discard(self, sandbox: Sandbox) -> None:
        sandbox.close()
        with self._lock:
            self._all.discard(sandbox)
            self._num_replaced += 1

    def _cut(self, result: SandboxResult) -> SandboxResult:
        limit = OUTPUT_CHARS
        extra = len(result.output) - limit
        if extra <= 0:
            return result
        if result.status is ToolStatus.ok:
            output = f"{result.output[:limit]}\n[{extra} more characters cut]"
        else:
            output = f"[{extra} characters cut]\n{result.output[-limit:]}"
        return replace(result, output=output)


def _close_result(opening: asyncio.Future[SandboxSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close_now()

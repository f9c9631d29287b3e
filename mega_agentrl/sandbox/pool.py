"""A pool of warm sandboxes with two coroutines: `run` for one call and `open` for a session.

`SandboxPool.run` waits for a free sandbox and runs code in a fresh interpreter; the timeout starts
when a sandbox takes the call. The call ends with its reply, its timeout, cancellation (at once) or
`close`. It works from any event loop: each of `config.num_workers` threads serves one call at a
time and talks to its sandbox by blocking reads with deadlines.

A stateless sandbox serves one call at a time. A stateful one serves many sessions, so that an idle
session costs a few MiB instead of a warm interpreter. Each session has its own supervisor, its own
namespaces (processes, files, network, IPC) and, where control groups are available, its own group,
so that a session that is killed, lies or exhausts its limits does not affect the others.

A sandbox that dies or does not answer is replaced when the next call needs one. Its call is
repeated once, and only if the code certainly did not run. If processes of a stateless sandbox were
killed for memory when it died, the code of its call has caused that; `session` has the rules for
sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import PythonMode, SandboxIsolation
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.cgroup import remove_stale_cgroups
from mega_agentrl.sandbox.client import (
    MAX_OUTPUT_CHARS,
    CancelToken,
    RequestRefusedError,
    Sandbox,
    SandboxLostError,
    SandboxResult,
)
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.isolation import check_isolation
from mega_agentrl.sandbox.session import (
    SandboxSession,
    SessionGroup,
    infra_error_result,
    oom_note,
)
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.sandbox.uid_lease import lease_uid
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mega_agentrl.config.sections.tools import PythonToolConfig

_MIN_CPU_S = 1.0
"""Smallest CPU limit, since the kernel counts whole seconds."""

_MAX_ATTEMPTS = 2
_logger = logging.getLogger(__name__)


class SandboxPool:
    """A pool of `config.num_workers` sandboxes; call `start` before the first `run` or `open`."""

    _session_type: type[SandboxSession] = SandboxSession

    def __init__(self, config: PythonToolConfig) -> None:
        self._config = config
        self._executor = ThreadPoolExecutor(config.num_workers, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._sandboxes: set[Sandbox] = set()
        self._session_groups: set[SessionGroup] = set()
        self._closed = False
        self._num_replaced = 0
        self._settings = GuestSettings()

    @property
    def num_replaced(self) -> int:
        """Number of sandboxes lost so far."""
        return self._num_replaced

    async def start(self) -> None:
        """Start and warm every sandbox; raises `ValueError` if isolation is not possible."""
        await asyncio.to_thread(self._check_and_configure)
        loop = asyncio.get_running_loop()
        startups = [
            loop.run_in_executor(self._executor, self._start_sandbox)
            for _ in range(self._config.num_workers)
        ]
        results = await asyncio.gather(*startups, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.close()
            if not isinstance(failures[0], SandboxLostError):
                raise failures[0]
            raise self._start_error(failures[0]) from failures[0]
        with self._lock:
            self._idle += [result for result in results if isinstance(result, Sandbox)]

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; errors of the code are in the result."""
        if self._config.mode is PythonMode.stateful:
            return await self._run_in_session(code, timeout_s)
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        cancel_token = CancelToken()
        try:
            result: SandboxResult = await self._run_in_thread(
                self._run_blocking, code, limit_s, cancel_token
            )
        except asyncio.CancelledError:
            cancel_token.cancel()
            raise
        except SandboxLostError as error:
            return infra_error_result(str(error))
        return result

    async def open(self) -> SandboxSession:
        """Open a session with a new stateful interpreter.

        Raises:
            ValueError: The pool is not in stateful mode.
            SandboxLostError: No sandbox could be started.
        """
        if self._config.mode is not PythonMode.stateful:
            raise ConfigError("tool.python.mode", self._config.mode, "stateful for a session")
        opening = asyncio.ensure_future(self._run_in_thread(self._open_blocking))
        try:
            session: SandboxSession = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_abandoned_session)
            raise
        return session

    async def close(self) -> None:
        """End every sandbox and wait for the threads."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Close from synchronous code; running calls end with `infra_error` at once."""
        with self._lock:
            self._closed = True
            sandboxes = list(self._sandboxes)
            self._idle.clear()
        for sandbox in sandboxes:
            sandbox.kill()
        self._executor.shutdown(wait=True)  # calls that still wait for a thread fail at once
        for sandbox in self._sandboxes:
            sandbox.close()
        for group in tuple(self._session_groups):
            group.close()

    def _start_error(self, failure: SandboxLostError) -> ValueError:
        """Return the error of a pool whose sandboxes do not start."""
        return InputError(
            "tool.python",
            f"a sandbox that did not start ({failure})",
            "a warm interpreter",
            "nested user namespaces or (mode=stateful) ptrace or seccomp user notification are "
            "not allowed here, or a module of tool.python.preload_modules="
            f"{list(self._config.preload_modules)} cannot be imported",
        )

    def _check_and_configure(self) -> None:
        config = self._config
        isolated = config.isolation is not SandboxIsolation.none
        stateful = config.mode is PythonMode.stateful
        if isolated:
            check_machine()
        else:
            _logger.warning(
                "tool.python.isolation=none: THE POLICY'S CODE RUNS WITHOUT ANY ISOLATION, with "
                "the rights of this process on this machine. For trusted code only."
            )
        self._settings = GuestSettings(
            preload_modules=tuple(config.preload_modules),
            seccomp_filter=seccomp_filter_base64(stateful=stateful) if isolated else "",
            stateful=stateful,
            isolated=isolated,
            memory_mib=config.memory_limit_mib,
            # A single thread reaches it only at the timeout; several threads share it.
            cpu_limit_s=max(_MIN_CPU_S, config.timeout_s),
            max_output_bytes=4 * MAX_OUTPUT_CHARS,  # the longest UTF-8 sequence is 4 bytes
        )

    async def _run_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in one of the pool's threads."""
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._executor, function, *args)
        except RuntimeError as error:
            if not self._closed:
                raise
            raise SandboxLostError("the sandbox pool is closed", may_have_run=False) from error
        return await future

    async def _run_in_session(self, code: str, timeout_s: float | None) -> SandboxResult:
        try:
            session = await self.open()
        except SandboxLostError as error:
            return infra_error_result(str(error))
        try:
            return await session.run(code, timeout_s)
        finally:
            await session.close()

    def _run_blocking(
        self, code: str, timeout_s: float, cancel_token: CancelToken
    ) -> SandboxResult:
        last_error = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                with self._borrowed_sandbox() as sandbox:
                    return sandbox.call(code, timeout_s, cancel_token)
            except RequestRefusedError as error:  # cancelled before it began
                return infra_error_result(str(error))
            except SandboxLostError as error:
                last_error = str(error)
                if error.num_oom_kills and error.may_have_run:
                    return _memory_result(error)
                if error.may_have_run:
                    break
        return infra_error_result(last_error)

    def _open_blocking(self) -> SandboxSession:
        last_error = SandboxLostError("no sandbox", may_have_run=False)
        for _ in range(_MAX_ATTEMPTS):
            try:
                with self._borrowed_sandbox() as sandbox:
                    connection, cgroup = sandbox.open()
                    group = SessionGroup(sandbox, cgroup, self._on_group_empty)
                    with self._lock:
                        self._session_groups.add(group)
                        sandbox.num_sessions += 1
            except RequestRefusedError as error:
                last_error = SandboxLostError(str(error), may_have_run=False)
                continue
            except SandboxLostError as error:
                last_error = error
                continue
            return self._session_type(
                connection, group, self._run_in_thread, self._config.timeout_s
            )
        raise last_error

    def _on_group_empty(self, group: SessionGroup) -> None:
        with self._lock:
            group.sandbox.num_sessions -= 1
            closed = self._closed
        if not closed:
            self._executor.submit(self._close_session_group, group)

    def _close_session_group(self, group: SessionGroup) -> None:
        group.close()
        with self._lock:
            self._session_groups.discard(group)

    @contextlib.contextmanager
    def _borrowed_sandbox(self) -> Iterator[Sandbox]:
        """Lend a sandbox to this thread, and discard it if the block raises an error.

        After `RequestRefusedError` the sandbox still works and stays in the pool.

        Raises:
            SandboxLostError: No sandbox can be started.
        """
        sandbox = self._acquire_sandbox()
        is_usable = False
        try:
            yield sandbox
            is_usable = True
        except RequestRefusedError:
            is_usable = True
            raise
        finally:
            if is_usable:
                self._release_sandbox(sandbox)
            else:
                self._discard(sandbox)

    def _acquire_sandbox(self) -> Sandbox:
        with self._lock:
            if self._idle:
                sandbox = min(self._idle, key=lambda sandbox: sandbox.num_sessions)
                self._idle.remove(sandbox)
                return sandbox
        return self._start_sandbox()

    def _release_sandbox(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._idle.append(sandbox)

    def _start_sandbox(self) -> Sandbox:
        if self._closed:
            raise SandboxLostError("the sandbox pool is closed", may_have_run=False)
        sandbox = self._make_sandbox()
        with self._lock:
            self._sandboxes.add(sandbox)
            closed = self._closed
        if closed:  # `close_now` has not seen it
            sandbox.kill()
        return sandbox

    def _make_sandbox(self) -> Sandbox:
        return Sandbox(self._settings, total_memory_mib=self._config.total_memory_mib)

    def _discard(self, sandbox: Sandbox) -> None:
        sandbox.close()
        with self._lock:
            self._sandboxes.discard(sandbox)
            self._num_replaced += 1


def _memory_result(error: SandboxLostError) -> SandboxResult:
    """Return the result of a call whose sandbox was lost because the code took all its memory."""
    number = error.num_oom_kills
    _logger.info("%s: %s", error, oom_note(number))
    return SandboxResult(
        status=ToolStatus.user_error,
        output=f"[{oom_note(number)}.]",
        latency_s=0.0,
        num_oom_kills=number,
    )


def check_machine() -> None:
    """Raise `ValueError` if sandboxes cannot run here; remove what dead launchers have left."""
    remove_stale_cgroups()
    uid_lease = lease_uid()
    try:
        check_isolation(uid_lease.uid if uid_lease else None)
    finally:
        if uid_lease is not None:
            uid_lease.close()


def _close_abandoned_session(opening: asyncio.Future[SandboxSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close_now()

"""A pool of warm sandboxes behind one coroutine.

`run` consumes code and produces a typed `SandboxResult`; it waits for a free sandbox and for
the call, whose deadline starts when the sandbox takes it; it is unblocked by the answer, the
deadline or `close`. It works from any event loop, because each of `config.workers` threads
serves one call at a time and talks to its sandbox by blocking reads with deadlines.

A sandbox that dies or does not answer is replaced when the next call needs one. Its call is
repeated once, and only where the code certainly did not run: nothing runs twice silently.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.interpreter import Settings
from mega_agentrl.sandbox.isolation import check_isolation
from mega_agentrl.sandbox.supervisor import Sandbox, SandboxLostError, SandboxResult
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.config.sandbox_schema import PythonToolConfig

_ATTEMPTS = 2


class SandboxPool:
    """`config.workers` sandboxes; `start` before the first `run`."""

    def __init__(self, config: PythonToolConfig) -> None:
        self._config = config
        self._settings = Settings(
            preload=tuple(config.preload),
            memory_mib=config.memory_mib,
            output_bytes=4 * config.output_chars,  # the longest UTF-8 sequence is 4 bytes
        )
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._all: set[Sandbox] = set()
        self._closed = False
        self._num_replaced = 0

    @property
    def num_replaced(self) -> int:
        """Sandboxes lost so far."""
        return self._num_replaced

    async def start(self) -> None:
        """Warm every sandbox; raises `ValueError` where isolation is not to be had."""
        await asyncio.to_thread(check_isolation)
        loop = asyncio.get_running_loop()
        started = [
            loop.run_in_executor(self._threads, self._new) for _ in range(self._config.workers)
        ]
        try:
            sandboxes = await asyncio.gather(*started)
        except SandboxLostError as error:
            await self.close()
            raise ValueError(
                f"tool.python: a sandbox did not start ({error}); expected a warm interpreter. "
                "Probable cause: nested user namespaces are not allowed, or a module of "
                f"tool.python.preload={list(self._config.preload)} cannot be imported"
            ) from error
        with self._lock:
            self._idle += sandboxes

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; raises nothing for what the code does."""
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._run, code, limit_s)
        except RuntimeError:
            if not self._closed:
                raise
            return _infra_error("the sandbox pool is closed")

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

    def _run(self, code: str, timeout_s: float) -> SandboxResult:
        lost = ""
        for _ in range(_ATTEMPTS):
            try:
                sandbox = self._take()
            except SandboxLostError as error:
                lost = str(error)
                continue
            try:
                result = sandbox.call(code, timeout_s)
            except SandboxLostError as error:
                lost = str(error)
                self._discard(sandbox)
                if error.started:
                    break
                continue
            with self._lock:
                self._idle.append(sandbox)
            return self._cut(result)
        return _infra_error(lost)

    def _take(self) -> Sandbox:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> Sandbox:
        if self._closed:
            raise SandboxLostError("the sandbox pool is closed", started=False)
        sandbox = Sandbox(self._settings)
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
        limit = self._config.output_chars
        extra = len(result.output) - limit
        if extra <= 0:
            return result
        if result.status is ToolStatus.ok:
            output = f"{result.output[:limit]}\n[{extra} more characters cut]"
        else:
            output = f"[{extra} characters cut]\n{result.output[-limit:]}"
        return SandboxResult(status=result.status, output=output, latency_s=result.latency_s)


def _infra_error(why: str) -> SandboxResult:
    return SandboxResult(status=ToolStatus.infra_error, output=why, latency_s=0.0)

"""All sandbox hosts behind the interface of `sandbox.pool.SandboxPool`.

A call or a new session goes to the host with the fewest calls and sessions, where the session
stays. If a host is lost, so are its sessions, and their calls end with `infra_error`, because it is
unknown what they have done. A call without a session is retried once, because its interpreter and
everything that it could write to are gone with the host. If no other host is left, calls wait for
the replacement (`host_supervisor`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.runtime.sandboxes.host_supervisor import HostStartError, HostSupervisor
from mega_agentrl.sandbox.client import SandboxLostError
from mega_agentrl.sandbox.session import infra_error_result

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from mega_agentrl.config.sections.tools import PythonToolConfig
    from mega_agentrl.runtime.sandboxes.host_client import HostClient
    from mega_agentrl.sandbox.client import SandboxResult

_MAX_ATTEMPTS = 2
_HOST_TIMEOUT_S = 15.0


class RemoteSandboxPool:
    """`config.num_hosts` hosts of `config.num_workers` sandboxes; `start` needs a Ray cluster."""

    def __init__(
        self, config: PythonToolConfig, log_folder: Path, *, host_timeout_s: float = _HOST_TIMEOUT_S
    ) -> None:
        self._config = config
        self._supervisor = HostSupervisor(config, log_folder, host_timeout_s=host_timeout_s)

    @property
    def num_replaced(self) -> int:
        """Number of sandboxes lost so far, including all sandboxes of lost hosts."""
        return self._supervisor.num_replaced

    async def start(self) -> None:
        """Start every host.

        Raises:
            ConfigError: A host cannot be placed or started.
        """
        try:
            await asyncio.to_thread(self._supervisor.start)
        except HostStartError as error:
            await self.close()
            raise ConfigError(
                "tool.python.num_hosts", self._config.num_hosts, "hosts that start", str(error)
            ) from error

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run code on the least loaded host, like `SandboxPool.run`."""
        try:
            _, _, result = await self._call_with_retry("run", code, timeout_s, is_repeatable=True)
        except SandboxLostError as error:
            return infra_error_result(str(error))
        answer: SandboxResult = result
        return answer

    async def open(self) -> RemoteSandboxSession:
        """Open a session on the least loaded host, like `SandboxPool.open`."""
        if self._config.mode is not PythonMode.stateful:
            raise ConfigError("tool.python.mode", self._config.mode, "stateful for a session")
        client, call_id, error_message = await self._call_with_retry("open")
        if error_message:
            raise SandboxLostError(error_message, may_have_run=False)
        return RemoteSandboxSession(client, call_id)

    async def close(self) -> None:
        """Close every host."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Close every host from synchronous code; running calls end with `infra_error` at once."""
        self._supervisor.close()

    async def _call_with_retry(
        self, method: str, *arguments: Any, is_repeatable: bool = False
    ) -> tuple[HostClient, int, Any]:
        """Call a method on the least loaded host.

        Args:
            method: Name of the method.
            arguments: Arguments of the method after the call id.
            is_repeatable: Whether the call may be sent again although it may have run.

        Returns:
            The host's client, the call id and the answer.

        Raises:
            SandboxLostError: No host answered.
        """
        last_error = SandboxLostError("no sandbox host", may_have_run=False)
        for _ in range(_MAX_ATTEMPTS):
            client = await self._supervisor.select_host()
            call_id = client.next_call_id()
            try:
                return client, call_id, await client.call(call_id, method, *arguments)
            except SandboxLostError as error:
                last_error = error
                if error.may_have_run and not is_repeatable:
                    break
        raise last_error


class RemoteSandboxSession:
    """A `SandboxSession` on a host; runs one call, fork or close at a time.

    `session_id` is the id of the call that created the session.
    """

    def __init__(self, client: HostClient, session_id: int) -> None:
        self._client = client
        self._session_id = session_id
        self._failure_reason = ""
        self._closed = False
        client.num_sessions += 1

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run code in the session, like `SandboxSession.run`."""
        if self._closed or self._failure_reason:
            return infra_error_result(self._failure_reason or "the session is closed")
        call_id = self._client.next_call_id()
        try:
            result: SandboxResult = await self._client.call(
                call_id, "run_in_session", self._session_id, code, timeout_s
            )
        except SandboxLostError as error:
            self._mark_failed(str(error))
            return infra_error_result(str(error))
        return result

    async def fork(self) -> RemoteSandboxSession:
        """Return a new session on the same host that starts from this one's state."""
        if self._closed or self._failure_reason:
            raise RuntimeError(
                f"the session cannot be forked: {self._failure_reason or 'it is closed'}"
            )
        call_id = self._client.next_call_id()
        try:
            error_message: str = await self._client.call(call_id, "fork", self._session_id)
        except SandboxLostError as error:
            self._mark_failed(str(error))
            raise RuntimeError(f"the session cannot be forked: {error}") from error
        if error_message:
            raise RuntimeError(error_message)
        return RemoteSandboxSession(self._client, call_id)

    async def close(self) -> None:
        """Close the session; safe to call twice."""
        self.close_now()

    def close_now(self) -> None:
        """Close the session from synchronous code, without waiting."""
        if self._closed:
            return
        self._closed = True
        self._client.num_sessions -= 1
        self._client.notify("close_session", self._session_id)

    def _mark_failed(self, reason: str) -> None:
        # It is unknown whether the call has run, so the session's state is undefined.
        self._failure_reason = f"the interpreter's state is lost: {reason}"

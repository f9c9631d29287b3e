"""All sandbox hosts as one: `tool.python.Sandboxes`, the same as `sandbox.pool.SandboxPool`.

A call or a new session goes to the host with the fewest calls and sessions; there a session
stays. A host that is lost takes its sessions with it, and their calls end as `infra_error`: what
such a call has done is not known. A call without a session is sent once more, as it left nothing
behind: its interpreter, with all that it could write to, went with the host. The other hosts go
on, and calls wait for the successor where there is no other (`sandbox_keeper`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import PythonMode
from mega_agentrl.runtime.sandbox_keeper import HostFailedError, HostKeeper
from mega_agentrl.sandbox.session import infra_error
from mega_agentrl.sandbox.supervisor import SandboxLostError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from mega_agentrl.config.sandbox_schema import PythonToolConfig
    from mega_agentrl.runtime.sandbox_link import HostLink
    from mega_agentrl.sandbox.supervisor import SandboxResult

_ATTEMPTS = 2
_SILENCE_S = 15.0


class SandboxGroup:
    """`config.hosts` hosts of `config.workers` sandboxes; `start` needs a joined cluster."""

    def __init__(
        self, config: PythonToolConfig, log_folder: Path, *, silence_s: float = _SILENCE_S
    ) -> None:
        """log_folder: takes a file of each host. silence_s: after which a host is lost."""
        self._config = config
        self._keeper = HostKeeper(config, log_folder, silence_s=silence_s)

    @property
    def num_replaced(self) -> int:
        """Sandboxes lost so far; a lost host counts with all of its own."""
        return self._keeper.num_replaced

    async def start(self) -> None:
        """Bring up every host; raises `ValueError` where one cannot be had."""
        try:
            await asyncio.to_thread(self._keeper.start)
        except HostFailedError as error:
            await self.close()
            raise ValueError(f"tool.python.hosts={self._config.hosts}: {error}") from error

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """See `SandboxPool.run`."""
        try:
            _, _, result = await self._send("run", code, timeout_s, leaves_nothing=True)
        except SandboxLostError as error:
            return infra_error(str(error))
        answer: SandboxResult = result
        return answer

    async def open(self) -> HostedSession:
        """See `SandboxPool.open`."""
        if self._config.mode is not PythonMode.stateful:
            raise ValueError(
                f"tool.python.mode={self._config.mode}: expected stateful for a session"
            )
        link, number, why_not = await self._send("open")
        if why_not:
            raise SandboxLostError(why_not, started=False)
        return HostedSession(link, number)

    async def close(self) -> None:
        """End every host."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """The same from synchronous code; running calls become `infra_error` at once."""
        self._keeper.close()

    async def _send(
        self, method: str, *arguments: Any, leaves_nothing: bool = False
    ) -> tuple[HostLink, int, Any]:
        """Who was asked, the number of the call, and the answer; raises `SandboxLostError`.

        leaves_nothing: it may be sent again although it may have run.
        """
        lost = SandboxLostError("no sandbox host", started=False)
        for _ in range(_ATTEMPTS):
            link = await self._keeper.pick()
            number = link.new_number()
            try:
                return link, number, await link.ask(number, method, *arguments)
            except SandboxLostError as error:
                lost = error
                if error.started and not leaves_nothing:
                    break
        raise lost


class HostedSession:
    """A `SandboxSession` on a host. One call, fork or close at a time."""

    def __init__(self, link: HostLink, name: int) -> None:
        """Made by `SandboxGroup.open` and `fork`. name: the number of the call that made it."""
        self._link = link
        self._name = name
        self._failure = ""
        self._closed = False
        link.num_sessions += 1

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """See `SandboxSession.run`."""
        if self._closed or self._failure:
            return infra_error(self._failure or "the session is closed")
        number = self._link.new_number()
        try:
            result: SandboxResult = await self._link.ask(
                number, "run_in", self._name, code, timeout_s
            )
        except SandboxLostError as error:
            self._fail(str(error))
            return infra_error(str(error))
        return result

    async def fork(self) -> HostedSession:
        """See `SandboxSession.fork`."""
        if self._closed or self._failure:
            raise RuntimeError(f"the session cannot be forked: {self._failure or 'it is closed'}")
        number = self._link.new_number()
        try:
            why_not: str = await self._link.ask(number, "fork", self._name)
        except SandboxLostError as error:
            self._fail(str(error))
            raise RuntimeError(f"the session cannot be forked: {error}") from error
        if why_not:
            raise RuntimeError(why_not)
        return HostedSession(self._link, number)

    async def close(self) -> None:
        """End the interpreter; safe twice."""
        self.close_now()

    def close_now(self) -> None:
        """The same from synchronous code."""
        if self._closed:
            return
        self._closed = True
        self._link.num_sessions -= 1
        self._link.tell("close_session", self._name)

    def _fail(self, why: str) -> None:
        # Whether the call has run is not known, so nothing may go on from here.
        self._failure = f"the interpreter's state is lost: {why}"

"""Runs the attacks, which are Python code, with the shell of a workspace."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.sandbox.client import SandboxResult
    from mega_agentrl.sandbox.session import SandboxSession
    from mega_agentrl.sandbox.workspace.pool import WorkspacePool


class WorkspaceSession:
    """A workspace in which each call is a program of its own."""

    def __init__(self, session: SandboxSession) -> None:
        self._session = session
        self._group = session._group  # the tests ask which sandbox it is in

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a new interpreter; return the result without the note of its exit code."""
        result = await self._session.run(f"python3 -I -c {shlex.quote(code)}", timeout_s)
        output = result.output.replace("[exit code 137]", "[signal 9]")
        return replace(result, output=re.sub(r"\n?\[exit code \d+\]$", "", output))

    async def fork(self) -> WorkspaceSession:
        """Return a fork of the workspace."""
        return WorkspaceSession(await self._session.fork())

    async def close(self) -> None:
        """End the workspace."""
        await self._session.close()


class WorkspaceRunner:
    """The pool of workspaces, with the methods of the pool of interpreters."""

    def __init__(self, pool: WorkspacePool) -> None:
        self._pool = pool

    @property
    def num_replaced(self) -> int:
        """Number of sandboxes lost so far."""
        return self._pool.num_replaced

    async def open(self) -> WorkspaceSession:
        """Return a new workspace."""
        return WorkspaceSession(await self._pool.open())

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a workspace of its own."""
        session = await self.open()
        try:
            return await session.run(code, timeout_s)
        finally:
            await session.close()

"""The Python tool, which runs code in sandboxes.

By default each call runs in a fresh interpreter, as in ARPO (arXiv:2507.19849). With
`tool.python.mode=stateful` it runs in the trajectory's own interpreter, like a cell of a notebook,
and the interpreter is forked when the trajectory is.

The value of the last expression is printed, as in a notebook. The response is the stripped stdout,
or the error text if the code failed. Code that prints nothing runs once and gets
`EMPTY_OUTPUT_MESSAGE` (ARPO's released code runs it three times).

The tool does not know where the sandboxes are: a `SandboxProvider` runs them in this process
(`sandbox.pool`) or on other nodes (`runtime.sandboxes.remote_pool`).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Protocol

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.tool.base import Tool, ToolResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.sections.tools import PythonToolConfig
    from mega_agentrl.sandbox.client import SandboxResult

EMPTY_OUTPUT_MESSAGE = "Tool(python) returned empty output."
"""The wording of ARPO's released code."""


class InterpreterSession(Protocol):
    """One trajectory's interpreter; `sandbox.session.SandboxSession` implements it."""

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code`; its errors are in the result. Cancelling ends it at once."""

    async def fork(self) -> InterpreterSession:
        """Return a session that continues from this state; raises `RuntimeError` if that fails."""

    async def close(self) -> None:
        """End the interpreter. Safe to call twice."""

    def close_now(self) -> None:
        """Close without an event loop."""


class SandboxProvider(Protocol):
    """A source of sandboxes that works from any event loop; `sandbox.pool.SandboxPool` is one."""

    @property
    def num_replaced(self) -> int:
        """Number of sandboxes lost so far."""

    async def start(self) -> None:
        """Start the sandboxes once, before all else; raises `ValueError` if that fails."""

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; its errors are in the result."""

    async def open(self) -> InterpreterSession:
        """Return a new session; raises `RuntimeError` if none can be opened."""

    async def close(self) -> None:
        """End all sandboxes. Safe to call twice."""

    def close_now(self) -> None:
        """Close without an event loop."""


class PythonTool(Tool):
    """Runs code in sandboxes, which enforce each call's timeout.

    The state of a trajectory is its session, or None in stateless mode.

    Args:
        config: section `tool.python`.
        sandboxes: where the code runs, owned by the tool from now on; None creates a pool in this
            process.
    """

    name = "python"
    description = "Runs Python code; the answer is what it prints and its last expression."
    text_argument = "code"
    timeout_s = None

    def __init__(self, config: PythonToolConfig, sandboxes: SandboxProvider | None = None) -> None:
        self._sandbox_provider: SandboxProvider = sandboxes or SandboxPool(config)
        self._stateful = config.mode is PythonMode.stateful

    async def start(self) -> None:
        """Warm the sandboxes; raises `ValueError` if they cannot be isolated."""
        await self._sandbox_provider.start()

    async def close(self) -> None:
        """End the sandboxes."""
        await self._sandbox_provider.close()

    def close_now(self) -> None:
        """Close without an event loop."""
        self._sandbox_provider.close_now()

    async def create(self, kwargs: Mapping[str, Any]) -> InterpreterSession | None:
        """Open the trajectory's interpreter; raises `RuntimeError` if that fails."""
        return await self._sandbox_provider.open() if self._stateful else None

    async def execute(
        self,
        state: InterpreterSession | None,
        arguments: Mapping[str, Any],
        kwargs: Mapping[str, Any],
    ) -> ToolResponse:
        """Run `arguments["code"]`; `kwargs["timeout_s"]` overrides the configured timeout."""
        code = print_last_expression(str(arguments["code"]))
        run = self._sandbox_provider.run if state is None else state.run
        result = await run(code, kwargs.get("timeout_s"))
        return ToolResponse(
            text=result.output or EMPTY_OUTPUT_MESSAGE,
            status=result.status,
            metrics={
                "run_s": result.latency_s,
                "state_lost": float(result.state_lost),
                "oom_kills": float(result.num_oom_kills),
            },
        )

    async def fork(self, state: InterpreterSession | None) -> InterpreterSession | None:
        """Fork the interpreter, variables and files; raises `RuntimeError` if that fails."""
        return None if state is None else await state.fork()

    async def release(self, state: InterpreterSession | None, kwargs: Mapping[str, Any]) -> None:
        """End the trajectory's interpreter."""
        if state is not None:
            await state.close()


def print_last_expression(code: str) -> str:
    """Return `code` with its last top-level expression wrapped in `print(...)`.

    The code is unchanged if its last statement is not an expression, already calls the bare name
    `print`, or if it does not parse (the interpreter then reports the error).
    """
    try:
        tree = ast.parse(code)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr) or _is_print(last.value):
            return code
        printed = ast.Call(
            func=ast.Name(id="print", ctx=ast.Load()), args=[last.value], keywords=[]
        )
        tree.body[-1] = ast.Expr(value=printed)
        return ast.unparse(ast.fix_missing_locations(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def _is_print(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )

"""The Python tool: each call a fresh interpreter in a sandbox (ARPO's), or the next cell of the
trajectory's own interpreter (`tool.python.mode=stateful`), forked where the trajectory is.

The last expression of the code is printed, as in a notebook; the answer is the stripped
stdout, or the error text when the code failed. Code that prints nothing has run once and is
answered with `EMPTY_ANSWER` (the released code runs it three times).

Where the sandboxes are is not known here: behind `Sandboxes` they are this process's own
(`sandbox.pool`) or on other nodes (`runtime.sandbox_group`).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Protocol

from mega_agentrl.config.choices import PythonMode
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.tool.protocol import Tool, ToolAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.sandbox_schema import PythonToolConfig
    from mega_agentrl.sandbox.supervisor import SandboxResult

EMPTY_ANSWER = "Tool(python) returned empty output."
"""The released wording."""


class Session(Protocol):
    """One trajectory's interpreter, see `sandbox.session.SandboxSession`."""

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code`; raises nothing for what it does. Cancelling ends it at once."""

    async def fork(self) -> Session:
        """A session that goes on from this state; raises `RuntimeError` where none can be had."""

    async def close(self) -> None:
        """End the interpreter; safe twice."""

    def close_now(self) -> None:
        """The same from synchronous code."""


class Sandboxes(Protocol):
    """Where code runs, see `sandbox.pool.SandboxPool`; works from any event loop."""

    @property
    def num_replaced(self) -> int:
        """Sandboxes lost so far."""

    async def start(self) -> None:
        """Once, before all else; raises `ValueError` where there can be no sandboxes."""

    async def run(self, code: str, timeout_s: float | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; raises nothing for what it does."""

    async def open(self) -> Session:
        """A new session; raises `RuntimeError` where none can be had."""

    async def close(self) -> None:
        """End everything; safe twice."""

    def close_now(self) -> None:
        """The same from synchronous code."""


class PythonTool(Tool):
    """Runs code in sandboxes, which keep each call's deadline.

    The state of a trajectory is its session; None in stateless mode.
    """

    name = "python"
    description = "Runs Python code; the answer is what it prints and its last expression."
    argument = "code"
    deadline_s = None

    def __init__(self, config: PythonToolConfig, sandboxes: Sandboxes | None = None) -> None:
        """sandboxes: that it owns from now on; None for a pool in this process."""
        self._sandboxes: Sandboxes = sandboxes or SandboxPool(config)
        self._keeps_state = config.mode is PythonMode.stateful

    async def start(self) -> None:
        """Warm the sandboxes; raises `ValueError` where they cannot be isolated."""
        await self._sandboxes.start()

    async def close(self) -> None:
        """End the sandboxes."""
        await self._sandboxes.close()

    def close_now(self) -> None:
        """End the sandboxes from synchronous code."""
        self._sandboxes.close_now()

    async def create(self, kwargs: Mapping[str, Any]) -> Session | None:
        """The trajectory's interpreter; raises `RuntimeError` where none can be had."""
        return await self._sandboxes.open() if self._keeps_state else None

    async def execute(
        self, state: Session | None, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Run `arguments["code"]`; `kwargs["timeout_s"]` overrides the configured limit."""
        code = print_last_expression(str(arguments["code"]))
        run = self._sandboxes.run if state is None else state.run
        result = await run(code, kwargs.get("timeout_s"))
        return ToolAnswer(
            text=result.output or EMPTY_ANSWER,
            status=result.status,
            metrics={"run_s": result.latency_s, "state_lost": float(result.state_lost)},
        )

    async def fork(self, state: Session | None) -> Session | None:
        """An interpreter with the same variables and files; raises `RuntimeError` where it
        cannot be had."""
        return None if state is None else await state.fork()

    async def release(self, state: Session | None, kwargs: Mapping[str, Any]) -> None:
        """End the trajectory's interpreter."""
        if state is not None:
            await state.close()


def print_last_expression(code: str) -> str:
    """`code` with its last top-level expression wrapped into `print(...)`.

    Unchanged where the last statement is no expression, is already a call of the bare name
    `print`, or does not parse (the interpreter then reports the error).
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

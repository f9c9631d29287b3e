"""The Python tool, stateless as ARPO's: each call is a fresh interpreter in a sandbox.

The last expression of the code is printed, as in a notebook; the answer is the stripped
stdout, or the error text when the code failed. Code that prints nothing has run once and is
answered with `EMPTY_ANSWER` (the released code runs it three times).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.tool.protocol import Tool, ToolAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.sandbox_schema import PythonToolConfig

EMPTY_ANSWER = "Tool(python) returned empty output."
"""The released wording."""


class PythonTool(Tool):
    """Runs code in a pool of sandboxes, which keeps each call's deadline."""

    name = "python"
    argument = "code"
    deadline_s = None

    def __init__(self, config: PythonToolConfig) -> None:
        self._pool = SandboxPool(config)

    async def start(self) -> None:
        """Warm the sandboxes; raises `ValueError` where they cannot be isolated."""
        await self._pool.start()

    async def close(self) -> None:
        """End the sandboxes."""
        await self._pool.close()

    def close_now(self) -> None:
        """End the sandboxes from synchronous code."""
        self._pool.close_now()

    async def execute(
        self, state: Any, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolAnswer:
        """Run `arguments["code"]`; `kwargs["timeout_s"]` overrides the configured limit."""
        code = print_last_expression(str(arguments["code"]))
        result = await self._pool.run(code, kwargs.get("timeout_s"))
        return ToolAnswer(
            text=result.output or EMPTY_ANSWER,
            status=result.status,
            metrics={"run_s": result.latency_s},
        )


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

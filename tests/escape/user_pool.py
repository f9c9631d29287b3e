"""A launcher that is not root: starts a pool, runs attacks, prints their results.

python user_pool.py '{"mode": "stateful", "codes": [["print(1)", 2.0], ...], "fork": true}'
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from workspace_target import WorkspaceSession

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig, WorkspaceToolConfig
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.sandbox.workspace.pool import WorkspacePool


async def run(job: dict[str, Any]) -> list[tuple[str, str]]:
    """Return status and output of every code, each with its time limit, in order.

    With `fork`, of the last one in a fork, too.
    """
    pool: SandboxPool
    if job["mode"] == "workspace":
        pool = WorkspacePool(WorkspaceToolConfig(root="host", num_processes=64))
    else:
        mode = PythonMode(job["mode"])
        values = {"num_workers": 2, "memory_limit_mib": 128, "preload_modules": []}
        pool = SandboxPool(PythonToolConfig(**values, mode=mode))
    await pool.start()
    try:
        runner: Any = pool if job["mode"] == "stateless" else await pool.open()
        if job["mode"] == "workspace":
            runner = WorkspaceSession(runner)
        results = [await runner.run(code, timeout_s) for code, timeout_s in job["codes"]]
        if job["fork"]:
            results.append(await (await runner.fork()).run(*job["codes"][-1]))
    finally:
        await pool.close()
    return [(result.status.value, result.output) for result in results]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))) + "\n")

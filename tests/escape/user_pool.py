"""A launcher that is not root: starts a pool, runs attacks, prints their results.

python user_pool.py '{"mode": "stateful", "codes": [...], "timeout_s": 2.0, "fork": true}'
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool


async def run(job: dict[str, Any]) -> list[tuple[str, str]]:
    """Status and output of every code in order; with `fork`, of the last one in a fork, too."""
    values = {
        "num_workers": 2,
        "memory_limit_mib": 128,
        "preload_modules": [],
        "mode": PythonMode(job["mode"]),
    }
    pool = SandboxPool(PythonToolConfig(**values))
    await pool.start()
    try:
        runner = await pool.open() if job["mode"] == "stateful" else pool
        results = [await runner.run(code, job["timeout_s"]) for code in job["codes"]]
        if job["fork"]:
            results.append(await (await runner.fork()).run(job["codes"][-1], job["timeout_s"]))
    finally:
        await pool.close()
    return [(result.status.value, result.output) for result in results]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))) + "\n")

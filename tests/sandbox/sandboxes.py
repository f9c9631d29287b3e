"""Pools for the tests of sandboxes, and what became of their processes."""

import asyncio
import time
from pathlib import Path

from mega_agentrl.config.choices import PythonMode
from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool


def make_pool(**changes):
    """A started pool of one sandbox without preloaded modules; works from any event loop."""
    values = {"workers": 1, "timeout_s": 10.0, "memory_mib": 256, "preload": []}
    pool = SandboxPool(PythonToolConfig(**(values | changes)))
    asyncio.run(pool.start())
    return pool


def make_stateful_pool(**changes):
    """The same, for sessions; two calls at once."""
    return make_pool(**({"mode": PythonMode.stateful, "workers": 2} | changes))


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return ") Z " not in stat


def gone(pids, *, timeout_s=2.0):
    """True as soon as none of them is alive: the kernel needs a moment after the kill."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        found += [child, *descendants(child)]
    return found

"""Pools for the tests of sandboxes, and what became of their processes."""

import asyncio
import itertools
import os
import time
from contextlib import asynccontextmanager

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool
from tests.escape.outside import pids_named

STATEFUL = {"mode": PythonMode.stateful, "num_workers": 2}
"""Options of a pool for sessions; two calls at once."""


async def start_pool(**changes):
    """A started pool of one sandbox without preloaded modules; works from any event loop."""
    values = {"num_workers": 1, "timeout_s": 60.0, "memory_limit_mib": 256, "preload_modules": []}
    pool = SandboxPool(PythonToolConfig(**(values | changes)))
    await pool.start()
    return pool


@asynccontextmanager
async def running_pool(**changes):
    """The same pool, which ends with the block."""
    pool = await start_pool(**changes)
    try:
        yield pool
    finally:
        await pool.close()


def shared_pool(**changes):
    """The same pool for a fixture of several tests."""
    pool = asyncio.run(start_pool(**changes))
    yield pool
    pool.close_now()


_numbers = itertools.count()


def named(code):
    """`code` that names its process first, and the name: nobody else's, at most 15 characters."""
    name = f"sbx{os.getpid() % 100000}x{next(_numbers)}"
    return f"open('/proc/self/comm', 'w').write({name!r})\n{code}", name


def wait_until_running(name, number=1, timeout_s=120.0):
    """Return once so many processes are called `name`: code made by `named` has begun."""
    deadline = time.monotonic() + timeout_s
    while len(pids_named(name)) < number:
        assert time.monotonic() < deadline, f"{number} processes {name} within {timeout_s:g} s"
        time.sleep(0.01)

"""Pools for the tests of sandboxes."""

import asyncio

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

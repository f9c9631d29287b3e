"""Pools for the tests of sandboxes, and what became of their processes."""

import asyncio
import itertools
import os
import time
from pathlib import Path

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool


def make_pool(**changes):
    """A started pool of one sandbox without preloaded modules; works from any event loop."""
    values = {"num_workers": 1, "timeout_s": 10.0, "memory_limit_mib": 256, "preload_modules": []}
    pool = SandboxPool(PythonToolConfig(**(values | changes)))
    asyncio.run(pool.start())
    return pool


def make_stateful_pool(**changes):
    """The same, for sessions; two calls at once."""
    return make_pool(**({"mode": PythonMode.stateful, "num_workers": 2} | changes))


_numbers = itertools.count()


def named(code):
    """`code` that names its process first, and the name: nobody else's, at most 15 characters."""
    name = f"sbx{os.getpid() % 100000}x{next(_numbers)}"
    return f"open('/proc/self/comm', 'w').write({name!r})\n{code}", name


def wait_until_running(name, number=1, timeout_s=30.0):
    """Return once so many processes are called `name`: code made by `named` has begun."""
    deadline = time.monotonic() + timeout_s
    while sum(map(_is_called, Path("/proc").glob("[0-9]*"), itertools.repeat(name))) < number:
        assert time.monotonic() < deadline, f"{number} processes {name} within {timeout_s:g} s"
        time.sleep(0.01)


def _is_called(folder, name):
    try:
        return (folder / "comm").read_text(encoding="utf-8", errors="replace").strip() == name
    except (FileNotFoundError, ProcessLookupError):
        return False

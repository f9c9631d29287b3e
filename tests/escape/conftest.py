"""Two pools for all attacks, one for each way in which code meets them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

import pytest

from mega_agentrl.config.enums import PythonMode
from tests.sandbox.sandboxes import shared_pool

LIMIT_S = 30.0
OVERTIME_S = 20.0
"""Far more than what is promised: a machine under load is no escape."""


class Target:
    """Where an attack runs: in a fresh interpreter each call, or in one session."""

    def __init__(self, pool, session):
        self.pool = pool
        self.session = session

    async def attack(self, code, timeout_s=LIMIT_S):
        """The attack's result; it must not outlive its deadline."""
        runner = self.session or self.pool
        begin = time.monotonic()
        result = await runner.run(code, timeout_s)
        assert time.monotonic() - begin < timeout_s + OVERTIME_S
        return result

    async def start_again(self):
        """Give up a session that may have lied about itself."""
        if self.session:
            await self.session.close()
            self.session = await self.pool.open()

    async def check_serves(self):
        """The next calls are as if nothing had happened."""
        write = "open('note', 'w').write('6 * 7'); print(eval(open('note').read()))"
        results = await asyncio.gather(*(self.pool.run(write) for _ in range(4)))
        if self.session:
            fresh = await self.pool.open()
            results.append(await fresh.run(write))
            await fresh.close()
            # After a timeout the answer begins by saying that the state is lost.
            results.append(await self.session.run(write))
        for result in results:
            assert result.status.value == "ok", result
            assert result.output.splitlines()[-1] == "42"


OPTIONS = {"num_workers": 2, "timeout_s": LIMIT_S, "memory_limit_mib": 128}


@pytest.fixture(scope="session")
def stateless_pool():
    yield from shared_pool(**OPTIONS)


@pytest.fixture(scope="session")
def pool():
    """The one that has sessions."""
    yield from shared_pool(**OPTIONS, mode=PythonMode.stateful)


@pytest.fixture(params=["stateless", "stateful"])
async def target(request, stateless_pool, pool):
    if request.param == "stateful":
        made = Target(pool, await pool.open())
    else:
        made = Target(stateless_pool, None)
    yield made
    await made.check_serves()
    if made.session:
        await made.session.close()


@pytest.fixture
def marker(_numbers=itertools.count()):  # noqa: B008  one counter for the whole run
    """A process name of at most 15 characters that nobody else has."""
    return f"esc{os.getpid() % 100000}x{next(_numbers)}"

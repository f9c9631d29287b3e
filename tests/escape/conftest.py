"""Three pools for all attacks, one for each way in which code meets them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

import pytest

from mega_agentrl.config.enums import PythonMode
from tests.escape.outside import TARGETS
from tests.escape.workspace_target import WorkspaceRunner
from tests.sandbox.sandboxes import shared_pool
from tests.sandbox.workspace.workspaces import shared_workspace_pool

LIMIT_S = 60.0
OVERTIME_S = 120.0
"""Far more than what is promised: a machine under load is no escape."""


class Target:
    """Where an attack runs: in a fresh interpreter each call, in one session, or in a workspace.

    Attributes:
        keeps_processes: Whether processes in the background run on after their call.
        keeps_interpreter: Whether the interpreter of a call is that of the next one.
        num_files: More files than fit.
    """

    def __init__(self, pool, session, *, is_workspace=False):
        self.pool = pool
        self.session = session
        self.keeps_processes = is_workspace
        self.num_files = 200_001 if is_workspace else 5000
        self.keeps_interpreter = session is not None and not is_workspace

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
        """The next calls, one in each sandbox at once, are as if nothing had happened."""
        write = "open('note', 'w').write('6 * 7'); print(eval(open('note').read()))"
        results = await asyncio.gather(*(self.pool.run(write) for _ in range(NUM_SANDBOXES)))
        if self.session:
            # After a timeout the answer begins by saying that the state is lost.
            results.append(await self.session.run(write))
        for result in results:
            assert result.status.value == "ok", result
            assert result.output.splitlines()[-1] == "42"


NUM_SANDBOXES = 2
OPTIONS = {"num_workers": NUM_SANDBOXES, "timeout_s": LIMIT_S, "memory_limit_mib": 128}


@pytest.fixture(scope="session")
def stateless_pool():
    yield from shared_pool(**OPTIONS)


@pytest.fixture(scope="session")
def pool():
    """The one that has sessions."""
    yield from shared_pool(**OPTIONS, mode=PythonMode.stateful)


@pytest.fixture(scope="session")
def workspace_pool():
    for pool in shared_workspace_pool(
        timeout_s=LIMIT_S, memory_limit_mib=256, disk_limit_mib=64, num_processes=64
    ):
        yield WorkspaceRunner(pool)


@pytest.fixture
def target_pool(request):
    """The pool of the test's target; the others are not started for it."""
    names = {"stateless": "stateless_pool", "stateful": "pool", "workspace": "workspace_pool"}
    return request.getfixturevalue(names[request.node.callspec.params["target"]])


@pytest.fixture(params=TARGETS)
async def target(request, target_pool):
    session = None if request.param == "stateless" else await target_pool.open()
    made = Target(target_pool, session, is_workspace=request.param == "workspace")
    yield made
    await made.check_serves()
    if made.session:
        await made.session.close()


@pytest.fixture
def marker(_numbers=itertools.count()):  # noqa: B008  one counter for the whole run
    """A process name of at most 15 characters that nobody else has."""
    return f"esc{os.getpid() % 100000}x{next(_numbers)}"

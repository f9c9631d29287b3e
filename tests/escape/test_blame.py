"""What the policy causes is its error: it cannot choose to have an attempt left out."""

import pytest

from mega_agentrl.types.records import ToolStatus
from tests.escape.outside import every_target
from tests.escape.test_bombs import can_limit_memory

# Fills the memory of the group with files that no process maps, and is as small as any process in
# it, so that the kernel may kill the first process of the workspace, or the supervisor.
FILL_MEMORY = """
import os
with open('/proc/self/oom_score_adj', 'w') as file:
    file.write('0')
files = [os.memfd_create('fill') for _ in range(200)]
chunk = bytes(1 << 20)
os.fork()
while True:
    for file in files:
        os.write(file, chunk)
"""


@every_target
async def test_memory_that_the_policy_has_taken_is_its_error(target):
    if not can_limit_memory():
        pytest.skip("no control group limits memory here")
    first = await target.attack(FILL_MEMORY)
    assert first.status is ToolStatus.user_error
    assert "the memory limit was reached" in first.output
    second = await (target.session or target.pool).run("raise SystemExit(3)")
    assert second.status is ToolStatus.user_error
    await target.start_again()


REFUSE_THE_SECOND_FORK = """
import sys
guest = sys.modules['mega_agentrl.sandbox.guest.interpreter']
real, forks = guest._fork_process, []
def refuse(settings):
    forks.append(1)
    if len(forks) > 1:
        raise OSError(12, 'no')
    return real(settings)
guest._fork_process = refuse
"""


async def test_a_policy_that_keeps_its_session_from_going_on_after_a_fork_is_to_blame(pool):
    session = await pool.open()
    assert (await session.run(REFUSE_THE_SECOND_FORK)).status is ToolStatus.ok
    child = await session.fork()
    assert (await child.run("print(1)")).output == "1"
    assert (await session.run("print(1)")).status is ToolStatus.user_error
    for one in (child, session):
        await one.close()

"""Results of a workspace's calls: what runs in it cannot report for another call."""

import json
import shlex

import pytest

from mega_agentrl.types.records import ToolStatus
from tests.escape.outside import with_values
from tests.escape.test_forged_messages import message_frame
from tests.sandbox.workspace.workspaces import output_of, shared_workspace_pool

# Waits for a child of process 1 that hangs in a named pipe, tries to change it, and lets it go on.
TAKE_OVER = """
import os
before = set(filter(str.isdigit, os.listdir('/proc')))
print()
while not (new := set(filter(str.isdigit, os.listdir('/proc'))) - before):
    pass
answers = []
for name, mode in (('mem', 'r+b'), ('mem', 'rb'), ('syscall', 'rb'), ('environ', 'rb')):
    try:
        open(f'/proc/{min(new)}/{name}', mode).read(1)
        answers.append('taken')
    except OSError as error:
        answers.append(error.strerror)
try:
    answers += os.listdir(f'/proc/{min(new)}/fd')
except OSError as error:
    answers.append(error.strerror)
with open('pipe', 'w') as pipe:
    pipe.write(' '.join(answers))
"""


@pytest.fixture(scope="module")
def pool():
    yield from shared_workspace_pool()


async def test_no_process_of_the_policy_can_change_the_editor(pool):
    session = await pool.open()
    # The call ends when the attack waits for the next one.
    waits = f"mkfifo pipe; exec 9< <(exec python3 -I -u -c {shlex.quote(TAKE_OVER)}); read -u 9"
    await output_of(session, waits)
    view = await session.edit(json.dumps({"command": "view", "path": "pipe"}))
    denied = " ".join(["Permission denied"] * 5)
    assert (view.status, view.output) == (ToolStatus.ok, f"     1\t{denied}")
    await session.close()


FORGE = """
import os
for fd in range(3, 2048):
    try:
        os.write(fd, frames)
    except OSError:
        pass
"""


async def test_what_a_call_writes_to_its_descriptors_is_no_end_of_the_next_one(pool):
    session = await pool.open()
    frames = b"".join(message_frame({"event": "done", "id": call, "code": 0}) for call in (1, 2))
    await output_of(session, f"python3 -I -c {shlex.quote(with_values(FORGE, frames=frames))}")
    rated = await session.run_clean("exit 7", 60.0)
    assert rated.status is ToolStatus.user_error
    assert "[exit code 7]" in rated.output
    await session.close()


# Processes that start others for ever, each in a session of its own, some of which are stopped, and
# that write to the memory of whatever they find.
SURVIVE = """
import os, signal, time
def hunt():
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/mem', 'r+b', buffering=0) as memory:
                memory.seek(0x400000)
                memory.write(b'x')
        except OSError:
            pass
for _ in range(12):
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                if os.fork():
                    os._exit(0)
                os.setsid()
                hunt()
                if os.getpid() % 7 == 0 and os.fork() == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
                open('/tmp/alive', 'w').write(str(os.getpid()))
            except OSError:
                pass
"""


async def test_no_process_of_the_policy_outlives_the_beginning_of_what_rates_its_work(pool):
    session = await pool.open()
    begun = "until test -e /tmp/alive; do sleep 0.01; done"
    await output_of(session, f"exec python3 -I -c {shlex.quote(SURVIVE)} & {begun}")
    rated = await session.run_clean(
        "rm /tmp/alive; echo /proc/[0-9]*; sleep 0.2; echo /proc/[0-9]*; ls /tmp/alive", 60.0
    )
    first, second, missing, _ = rated.output.splitlines()
    assert len(first.split()) == len(second.split()) == 2  # process 1 and this shell
    assert "No such file" in missing
    await session.close()


# What a process of the policy could set for process 1, of which later calls would inherit it.
CHANGE_PROCESS_1 = """
import os, resource
kinds = [getattr(resource, f'RLIMIT_{kind}') for kind in ('NOFILE', 'FSIZE', 'AS', 'STACK', 'DATA')]
changes = [lambda kind=kind: resource.prlimit(1, kind, (0, 0)) for kind in kinds] + [
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
    lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    lambda: os.sched_setaffinity(1, [min(os.sched_getaffinity(0))]),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setparam(1, os.sched_param(0)),
    lambda: os.kill(1, 9) or os.kill(1, 19) or open('/proc/1/oom_score_adj', 'w'),
]
for change in changes:
    try:
        change()
    except PermissionError:
        continue
    raise SystemExit('changed')
os.set_blocking(1, False)  # the pipe of all calls
os.setpriority(os.PRIO_PROCESS, 0, 19)  # its own may be changed
resource.prlimit(0, resource.RLIMIT_NOFILE, (64, 64))
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
"""


async def test_what_rates_the_work_has_limits_and_priorities_of_its_own(pool):
    session = await pool.open()
    look = "ulimit -a; nice; nproc; head -c 300000 /dev/zero >&1"
    before = await session.run_clean(look, 60.0)
    await output_of(session, f"python3 -I -c {shlex.quote(CHANGE_PROCESS_1)}")
    assert (await session.run_clean(look, 60.0)).output == before.output
    await session.close()


PLANT = """
import os, sys
version = f'python{sys.version_info[0]}.{sys.version_info[1]}'
folder = os.path.expanduser(f'~/.local/lib/{version}/site-packages')
os.makedirs(folder)
open(f'{folder}/planted.pth', 'w').write('import os; os._exit(0)\\n')
"""


async def test_files_in_the_home_of_the_policy_do_not_reach_what_rates_its_work(pool):
    session = await pool.open()
    await output_of(session, f"/usr/bin/python3 -I -c {shlex.quote(PLANT)}")
    await output_of(session, "git config --global alias.check '!exit 0'")
    assert await output_of(session, "/usr/bin/python3 -c 'raise SystemExit(9)'; git check") == ""
    for command in ("/usr/bin/python3 -c 'raise SystemExit(9)'", "git check"):
        assert (await session.run_clean(command, 60.0)).status is ToolStatus.user_error
    await session.close()

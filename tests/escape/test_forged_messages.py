"""The one channel from code in a sandbox to its supervisor: invalid messages do no harm."""

import asyncio
import json
import socket
import struct
import subprocess
import sys

import pyseccomp
import pytest

from tests.escape.outside import interpreters_only, parameters, with_values
from tests.escape.test_neighbours import open_beside
from tests.sandbox.sandboxes import wait_until_running

SEND = """
import array, os, socket, time
for name in os.listdir('/proc/self/fd'):
    try:
        if not os.readlink('/proc/self/fd/' + name).startswith('socket:'):
            continue
    except FileNotFoundError:
        continue
    link = socket.socket(fileno=os.dup(int(name)))
    link.setblocking(False)
    extra = []
    if num_fds:
        files = array.array('i', [os.open('/dev/null', os.O_RDONLY) for _ in range(num_fds)])
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
    for message in messages * times:
        for _ in range(1000):
            try:
                link.sendmsg([message], extra)
                break
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
time.sleep(wait_s)
print('sent')
"""


def frame(body):
    return struct.pack(">I", len(body)) + body


def message_frame(message):
    return frame(json.dumps(message).encode())


FORGED = {
    "done": [message_frame({"event": "done", "id": 1, "code": 0})],
    "done as text": [message_frame({"event": "done", "id": 1, "code": "0"})],
    "ready and hello": [message_frame({"event": "ready"}), message_frame({"event": "hello"})],
    "no object": [frame(b"[1, 2]"), frame(b'"done"'), frame(b"null")],
    "nested": [frame(b"[" * 4000)],
    "number": [frame(b'{"code": 1' + b"0" * 4000 + b"}"), frame(b'{"code": 1e999}')],
    "no text": [frame(b"\xff\xfe\x00")],
    "too long": [struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000],
    "orders": [
        message_frame({"order": "run", "id": 1, "kind": "default", "code": "1", "timeout_s": 9}),
        message_frame({"order": 0}),
    ],
    "half a frame": [struct.pack(">I", 4000) + b"{"],
}


def test_the_attack_reaches_a_channel_that_is_open(tmp_path):
    ours, theirs = socket.socketpair()
    code = with_values(SEND, messages=FORGED["done"], times=1, num_fds=0, wait_s=0)
    with ours, theirs:
        command = [sys.executable, "-c", code]
        subprocess.run(command, pass_fds=[theirs.fileno()], cwd=tmp_path, timeout=300, check=True)
        assert ours.recv(1000) == FORGED["done"][0]


async def neighbour(target):
    """Return a session in the same sandbox, whose state must outlive the attack."""
    if target.session is None:
        return None
    other = await open_beside(target.pool, target.session)
    assert (await other.run("x = 5; print(x)")).output == "5"
    return other


@interpreters_only
@pytest.mark.parametrize("kind", parameters(FORGED, quick={"done", "nested", "too long"}))
async def test_a_forged_message_harms_no_neighbour(target, kind):
    replaced = target.pool.num_replaced
    other = await neighbour(target)
    code = with_values(SEND, messages=FORGED[kind], times=1, num_fds=0, wait_s=0.05)
    # An unfinished frame keeps the supervisor from the end of the call: the limit ends it.
    result = await target.attack(code, 0.5 if kind == "half a frame" else 60.0)
    assert result.status.value in ("ok", "user_error", "timeout")
    if other is not None:
        assert (await other.run("print(x)")).output == "5"
        await other.close()
    assert target.pool.num_replaced == replaced
    await target.start_again()


@interpreters_only
async def test_a_flood_of_descriptors_harms_no_neighbour(target):
    """Each message carries some, and the frame never ends."""
    replaced = target.pool.num_replaced
    other = await neighbour(target)
    head, rest = struct.pack(">I", 4096), [b"x"]
    head_only = with_values(SEND, messages=[head], times=1, num_fds=0, wait_s=0)
    flood = with_values(SEND, messages=rest, times=4000, num_fds=8, wait_s=0)
    await target.attack(head_only + flood, 1.0)
    calls = [target.pool.run("print(6 * 7)") for _ in range(2)]
    assert [result.output for result in await asyncio.gather(*calls)] == ["42"] * 2
    if other is not None:
        assert (await other.run("print(x)")).output == "5"
        await other.close()
    assert target.pool.num_replaced == replaced
    await target.start_again()


async def test_closing_every_descriptor_ends_at_most_the_call(target):
    for code in ("import os\nos.closerange(0, 100_000)", "import os\nos.closerange(3, 100_000)"):
        result = await target.attack(code, 0.5)
        assert result.status.value in ("ok", "user_error", "timeout")


async def test_seccomp_notifications_do_not_starve_other_sessions(target, marker):
    """System calls that the filter refers to the supervisor, from many processes at once."""
    clone = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "clone")
    ask = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        f"open('/proc/self/comm', 'w').write({marker!r})\n"
        "for _ in range(3): os.fork()\n"
        f"while True: libc.syscall({clone}, ctypes.c_long(0x10000011), 0, 0, 0, 0)"
    )
    attack = asyncio.create_task(target.attack(ask, 600.0))
    await asyncio.to_thread(wait_until_running, marker, 8)
    session = await target.pool.open() if target.session else None
    for _ in range(4):
        assert (await (session or target.pool).run("print(6 * 7)", 60.0)).output == "42"
    if session:
        await session.close()
    assert not attack.done()
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)

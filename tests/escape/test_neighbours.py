"""One session's code attacks what it shares with others: its supervisor, its user, the kernel.

The damage ends at the session: neighbours keep their state and get their answers in time, and no
sandbox is lost.
"""

import asyncio
import json
import struct
from pathlib import Path

import pytest

from tests.escape.outside import (
    end_all,
    interpreters_only,
    outside,
    parameters,
    pids_named,
    vanish,
    with_values,
)
from tests.escape.test_bombs import can_limit_memory
from tests.sandbox.guest.guest_program import wait_for
from tests.sandbox.sandboxes import wait_until_running

DEADLINE_S = 300.0

CHANNEL = """
import os, struct, sys, time
def find_channel():
    for fd in range(1023, 2, -1):
        try:
            if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
                return fd
        except OSError:
            pass
def send(*bodies):
    for body in bodies:
        try:
            os.write(channel, struct.pack('>I', len(body)) + body)
        except OSError:
            time.sleep(0.0005)
channel = find_channel()
guest = sys.modules['mega_agentrl.sandbox.guest.interpreter']
"""
"""Finds the channel to the supervisor, which is the last socket, and the module that reads it."""

PASS_DESCRIPTORS = """
import array, socket
link, other = socket.socketpair()
passed = 0
try:
    for _ in range(4):
        files = array.array('i', [0] * 100)
        socket.SocketType.sendmsg(link, [b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        passed += 100
except OSError as error:
    print(error.errno)
print(passed)
"""

LINGER = """
import array, socket
server = socket.create_server(('127.0.0.1', 0))
sender = socket.create_connection(server.getsockname())
receiver, _ = server.accept()
sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 20))
sender.setblocking(False)
try:
    while True:
        sender.send(bytes(1 << 16))
except BlockingIOError:
    pass
up = socket.socket(fileno=os.dup(channel))
def hand_over(fd, data=b'x'):
    try:
        files = array.array('i', [fd])
        socket.SocketType.sendmsg(up, [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    except OSError:
        pass
hand_over(sender.fileno(), struct.pack('>I', 200))  # a frame that never ends
for _ in range(7):
    hand_over(sender.fileno())
sender.close()
hand_over(0)  # one more than a reader accepts: it closes them all
time.sleep(2)
"""

STOP_THE_NEXT = """
import os, signal
for _ in range(4):
    if os.fork() == 0:
        while True:
            for distance in range(1, 9):
                try:
                    os.kill(os.getpid() + distance, signal.SIGSTOP)
                except OSError:
                    pass
"""

FLOOD = """
for _ in range(2):
    os.fork()
while True:
    try:
        os.write(channel, frames)  # short enough to be written whole or not at all
    except OSError:
        pass
"""

PACKETS = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None)
packets, writing = os.pipe2(os.O_DIRECT)
for fd in (1, 2, packets):
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
for _ in range(256):
    os.write(writing, b'x')
os.fork()
out = 1 + (os.fork() == 0)
while True:
    libc.tee(packets, out, ctypes.c_size_t(1 << 20), 0)  # 256 packets of a byte at once
"""

VFORK = """
import ctypes, threading, time
libc = ctypes.PyDLL(None)
child = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: libc.pause())
stack = ctypes.create_string_buffer(1 << 20)
top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 19))
call = ctypes.CDLL(None).clone
thread = lambda: call(ctypes.CDLL(None).pause, top, 0x4000 | 0x100 | 17, None)
threading.Thread(target=thread, daemon=True).start()
time.sleep(0.1)
print('stuck')
"""


def json_body(**fields):
    return json.dumps(fields).encode()


async def open_beside(pool, session):
    """A new session in the same sandbox as another."""
    opened = []
    while not opened or opened[-1]._group.sandbox is not session._group.sandbox:
        assert len(opened) < 20
        opened.append(await pool.open())
    for one in opened[:-1]:
        await one.close()
    return opened[-1]


async def open_two(pool):
    """An attacker and a neighbour in one sandbox."""
    attacker = await pool.open()
    return attacker, await open_beside(pool, attacker)


async def runner_of(target):
    """A neighbour: a session in the same sandbox, or the pool of a stateless target."""
    return await open_beside(target.pool, target.session) if target.session else target.pool


async def neighbour(target, runner):
    """Check the answers of some calls, one of which is a fork's."""
    for number in range(3):
        code = "x = globals().get('x', 40) + 1; print(x)"
        result = await runner.run(code, DEADLINE_S)
        expected = f"{41 + number}" if target.keeps_interpreter else "41"
        assert (result.status.value, result.output) == ("ok", expected)
        if target.session and number == 2:
            child = await runner.fork()
            look = "print(x)" if target.keeps_interpreter else code
            assert (await child.run(look, DEADLINE_S)).output == expected
            await child.close()


def flood_of(**fields):
    """Frames of one event, about 14,000 bytes."""
    frame = struct.pack(">I", len(json_body(**fields))) + json_body(**fields)
    return CHANNEL + with_values(FLOOD, frames=frame * (14_000 // len(frame)))


LOUD = {
    "flood of events": flood_of(event="hello"),
    "flood of ends": flood_of(event="done", code=0),
    "packets of a byte": PACKETS,
    "processes that stop others": STOP_THE_NEXT,
    "unstoppable thread": VFORK,
    "a socket that lingers": CHANNEL + LINGER,
}


@interpreters_only
@pytest.mark.parametrize(
    "kind",
    [
        # Its session waits as long as processes may take in order to stop.
        pytest.param(kind, marks=pytest.mark.slow(35) if kind == "unstoppable thread" else ())
        for kind in LOUD
    ],
)
async def test_a_neighbour_gets_its_answers_during_an_attack(target, marker, kind):
    replaced = target.pool.num_replaced
    runner = await runner_of(target)
    name = f"open('/proc/self/comm', 'w').write({marker!r})\n"
    attack = asyncio.create_task(target.attack(name + LOUD[kind], 600.0))
    await asyncio.to_thread(wait_for, lambda: attack.done() or pids_named(marker))
    await neighbour(target, runner)
    if kind == "packets of a byte":  # the others end soon, or are ended for what they do
        assert not attack.done()
    if kind == "unstoppable thread":
        assert (await attack).status.value in ("ok", "user_error")
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)
    await target.start_again()
    if target.session:
        await runner.close()
    assert target.pool.num_replaced == replaced


FALSE_ENDS = {
    "below all signals": json_body(event="done", id=1, code=-1000),
    "a signal": json_body(event="done", id=1, code=-9),
    "huge": b'{"event": "done", "id": 1, "code": 1' + b"0" * 100 + b"}",
    "infinite": b'{"event": "done", "id": 1, "code": 1e999}',
    "not a number": b'{"event": "done", "id": 1, "code": NaN}',
    "a flag": json_body(event="done", id=1, code=True),
    "a text": json_body(event="done", id=1, code="0"),
    "a list": json_body(event="done", id=1, code=[]),
    "nothing": json_body(event="done", id=1, code=None),
    "missing": json_body(event="done"),
    "one more field": json_body(event="done", id=1, code=0, more=1),
    "another kind": json_body(event="hello"),
    "a list as kind": json_body(event=["done"], code=0),
    "deep": b"[" * 200,
}


@interpreters_only
@pytest.mark.parametrize("kind", parameters(FALSE_ENDS, quick={"a signal", "huge", "deep"}))
async def test_a_false_end_of_a_call_ends_the_liar_alone(target, kind):
    """The liar is ended; nothing is raised, and no sandbox is lost or left over."""
    replaced, sandboxes = target.pool.num_replaced, set(target.pool._sandboxes)
    code = CHANNEL + with_values("send(body)\ntime.sleep(600)", body=FALSE_ENDS[kind])
    result = await target.attack(code)
    assert result.status.value == "user_error"
    await target.check_serves()
    assert target.pool.num_replaced == replaced
    assert target.pool._sandboxes == sandboxes


@interpreters_only
async def test_a_second_end_of_a_call_is_no_answer_to_the_next(target):
    """The second, which comes with the first, is no answer to the next call."""
    end = json_body(event="done", id=1, code=0)
    frame = struct.pack(">I", len(end)) + end
    code = with_values("os.write(channel, frames)\ntime.sleep(600)", frames=frame * 2)
    assert (await target.attack(CHANNEL + code)).status.value in ("ok", "user_error")
    for number in range(3):
        result = await (target.session or target.pool).run(f"print({number})")
        assert result.output.splitlines()[-1] == str(number)


FALSE_REFUSALS = {
    "a list": json_body(event="refused", errno=[]),
    "infinite": b'{"event": "refused", "errno": 1e999}',
    "huge": b'{"event": "refused", "errno": 1' + b"0" * 100 + b"}",
    "negative": json_body(event="refused", errno=-5),
    "missing": json_body(event="refused"),
    "an end": json_body(event="done", id=1, code=0),
    "no object": b"[]",
}

LIE = """
def lie(link, settings):
    for fd in link.take_fds(3):
        os.close(fd)
    send(body)
    return link
guest._serve_fork = lie
"""


async def refused(session):
    """Whether a fork of the session is refused."""
    try:
        child = await session.fork()
    except RuntimeError:
        return True
    await child.close()
    return False


@pytest.mark.parametrize("kind", parameters(FALSE_REFUSALS, quick={"huge", "an end"}))
async def test_a_false_refusal_of_a_fork_costs_only_that_fork(pool, kind):
    replaced = pool.num_replaced
    attacker, other = await open_two(pool)
    assert (await other.run("x = 5; print(x)")).output == "5"
    code = CHANNEL + with_values(LIE, body=FALSE_REFUSALS[kind])
    assert (await attacker.run(code)).status.value == "ok"
    assert await refused(attacker)
    assert (await other.run("print(x)")).output == "5"
    assert not await refused(other)
    assert pool.num_replaced == replaced
    for session in (attacker, other):
        await session.close()


async def test_processes_left_behind_cannot_hold_anybody(pool):
    """Forks of the attacker and of its neighbours work while its children signal what comes."""
    attacker, other = await open_two(pool)
    await other.run("x = 5")
    for _ in range(2):
        result = await attacker.run(STOP_THE_NEXT + "\nprint('left')")
        assert result.output.splitlines()[-1] == "left"
        for session in (attacker, other):
            assert not await refused(session)
    result = await other.run("print(x)")
    assert (result.output, result.state_lost) == ("5", False)
    for session in (attacker, other):
        await session.close()


async def test_no_descriptor_can_be_passed(target, tmp_path):
    assert outside(PASS_DESCRIPTORS, tmp_path) == "400"
    assert (await target.attack(PASS_DESCRIPTORS)).output == "1\n0"
    await target.check_serves()  # while the attacker's session lives


EARLY_THREAD = """
import os, threading, time
found = []
def look():
    while True:
        for line in open('/proc/thread-self/status'):
            if line.startswith('CapEff') and int(line.split()[1], 16):
                found.append(line)
        time.sleep(0.01)
def start():
    threading.Thread(target=look, daemon=True).start()
    time.sleep(0.1)
os.register_at_fork(after_in_child=start)
"""


async def test_no_thread_keeps_the_capabilities_of_a_fork(pool):
    session = await pool.open()
    assert (await session.run(EARLY_THREAD)).status.value == "ok"
    try:
        child = await session.fork()
    except RuntimeError:
        child = None
    if child is not None:
        await child.run("time.sleep(0.2)")
        assert (await child.run("print(found)")).output == "[]"
        await child.close()
    await session.close()


QUESTIONS = """
import ctypes, threading
libc = ctypes.CDLL(None)
def ask():
    while True:
        libc.syscall(56, ctypes.c_long(0x10000011), 0, 0, 0, 0)
def hold(settings):
    open('/proc/self/comm', 'w').write(name)
    time.sleep(600)
threading.stack_size(1 << 18)  # their address space is limited
for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
guest._fork_process = hold
"""


@pytest.mark.parametrize(
    "killed",
    [True, pytest.param(False, marks=pytest.mark.slow(20))],
    ids=["killed", "until the deadline"],
)
async def test_questions_during_a_fork_hold_only_the_asking_session(pool, marker, killed):
    attacker, other = await open_two(pool)
    asked = await attacker.run(CHANNEL + with_values(QUESTIONS, name=marker))
    assert asked.status.value == "ok", asked
    forking = asyncio.create_task(refused(attacker))
    await asyncio.to_thread(wait_until_running, marker)
    for number in range(5):
        assert (await other.run(f"print({number})", DEADLINE_S)).output == str(number)
    assert not forking.done()
    if killed:
        assert end_all(marker)
    assert await forking
    for session in (attacker, other):
        await session.close()


def are_in_our_groups(marker):
    """For each process called `marker`, whether it is in a control group of ours."""
    lines = [Path(f"/proc/{pid}/cgroup").read_text("ascii") for pid in pids_named(marker)]
    return [any("mega_agentrl-" in line for line in text.splitlines()) for text in lines]


async def test_every_interpreter_is_born_in_the_group_of_its_session(pool, marker):
    if not can_limit_memory():
        pytest.skip("a machine whose cgroups we may not use")
    name = f"open('/proc/self/comm', 'w').write({marker!r}); print(1)"
    session = await pool.open()
    for _ in range(2):
        assert (await session.run(name)).output.splitlines()[-1] == "1"
        assert are_in_our_groups(marker) == [True]
        await session.run("import os; os._exit(0)")
        assert vanish(marker)
    await session.run("x = 1")
    child = await session.fork()
    await child.run("import os; os._exit(0)")
    assert (await child.run(name)).output.splitlines()[-1] == "1"
    assert are_in_our_groups(marker) == [True]
    for one in (child, session):
        await one.close()


async def test_every_call_is_in_the_group_of_its_sandbox(stateless_pool, marker):
    if not can_limit_memory():
        pytest.skip("a machine whose cgroups we may not use")
    name = f"open('/proc/self/comm', 'w').write({marker!r})\nimport os, time\n"
    await stateless_pool.run(name + "os._exit(0)")
    call = asyncio.create_task(stateless_pool.run(name + "os.fork(); time.sleep(60)"))
    await asyncio.to_thread(wait_until_running, marker, 2)
    assert are_in_our_groups(marker) == [True, True]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def charged_mib(session):
    """Memory that is charged to the session's control group."""
    for entrance in session._group._cgroup.procs_files:
        for name in ("memory.current", "memory.usage_in_bytes"):
            if Path(entrance).with_name(name).exists():
                return int(Path(entrance).with_name(name).read_text("ascii")) >> 20
    raise AssertionError("no memory group")


async def test_the_files_of_a_fork_are_charged_to_its_session(pool):
    if not can_limit_memory():
        pytest.skip("a machine whose cgroups we may not use")
    session = await pool.open()
    await session.run("with open('/tmp/f', 'wb') as f: f.write(bytes(40 << 20))")
    before = charged_mib(session)
    assert before >= 40
    child = await session.fork()
    assert charged_mib(session) >= before + 38
    for one in (child, session):
        await one.close()


@interpreters_only
async def test_asyncio_and_multiprocessing_work_without_passing_descriptors(target):
    code = (
        "import asyncio, multiprocessing\n"
        "async def answer(reader, writer):\n"
        "    writer.writelines([await reader.readexactly(3_000_000), b'!'])\n"
        "    await writer.drain(); writer.close()\n"
        "async def main():\n"
        "    server = await asyncio.start_server(answer, '127.0.0.1', 0)\n"
        "    link = await asyncio.open_connection(*server.sockets[0].getsockname())\n"
        "    link[1].write(bytes(3_000_000)); return len(await link[0].read(-1))\n"
        "print(asyncio.run(main()))\n"
        "with multiprocessing.get_context('fork').Pool(2) as workers:\n"
        "    print(workers.map(abs, [-1, -2]))\n"
        "print('forkserver' in multiprocessing.get_all_start_methods())"
    )
    if target.session is None:
        code = "import multiprocessing\n" + code[code.index("with multi") :]
    lines = (await target.attack(code)).output.splitlines()
    assert lines[-2:] == ["[1, 2]", "False"]
    if target.session is not None:
        assert lines[0] == "3000001"

"""Sessions: what stays between calls, what a fork copies, what is lost and when.

That sessions neither see nor disturb each other is tested in `tests/escape`.
"""

import asyncio
import os
import signal
import time

import pytest

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.sandbox.guest.processes import stat_fields
from mega_agentrl.sandbox.session import STATE_LOST_NOTE
from mega_agentrl.types.records import ToolStatus
from tests.escape.outside import pids_named
from tests.processes import descendants, wait_until_gone
from tests.sandbox.sandboxes import STATEFUL, named, running_pool, shared_pool, wait_until_running


@pytest.fixture(scope="module")
def pool():
    yield from shared_pool(**STATEFUL)


async def output_of(session, code):
    result = await session.run(code)
    assert result.status is ToolStatus.ok, result.output
    return result.output


async def test_variables_files_and_folder_stay(session):
    await output_of(session, "import os\nx = [1]\ndef f(): return x\nos.mkdir('d'); os.chdir('d')")
    await output_of(session, "open('note', 'w').write('hi'); x.append(2)")
    assert (
        await output_of(session, "print(f(), open('note').read(), os.getcwd())")
        == "[1, 2] hi /tmp/d"
    )
    failed = await session.run("x.append(3)\nraise KeyError('no')")
    assert failed.status is ToolStatus.user_error
    assert failed.output.endswith("KeyError: 'no'")
    left = await session.run("raise SystemExit(3)")
    assert left.status is ToolStatus.user_error
    assert await output_of(session, "print(x)") == "[1, 2, 3]"


async def test_fork_copies_and_separates(session):
    await output_of(
        session,
        "import os\nx = [1]\nos.mkdir('d'); open('d/f', 'w').write('old')\n"
        "os.symlink('d/f', 'link'); os.chmod('d/f', 0o640); os.utime('d/f', (5, 7))\n"
        "open('/dev/shm/s', 'w').write('shared'); os.mkfifo('pipe')\n"
        "sparse = open('hole', 'wb'); sparse.seek(1 << 20); sparse.write(b'e'); sparse.close()",
    )
    child = await session.fork()
    look = (
        "info = os.stat('d/f')\n"
        "print(x, open('link').read(), oct(info.st_mode), info.st_mtime, os.readlink('link'),\n"
        "      open('/dev/shm/s').read(), sorted(os.listdir('.')), os.stat('hole').st_size,\n"
        "      os.stat('hole').st_blocks)"
    )
    expected = "[1] old 0o100640 7.0 d/f shared ['d', 'hole', 'link', 'pipe'] 1048577 8"
    assert await output_of(child, look) == expected
    await output_of(child, "x.append(2); open('d/f', 'w').write('child'); os.remove('pipe')")
    assert await output_of(session, look) == expected
    await output_of(session, "x.append(3); open('d/f', 'w').write('parent')")
    assert await output_of(child, "print(x, open('d/f').read())") == "[1, 2] child"
    assert await output_of(session, "print(x, open('d/f').read())") == "[1, 3] parent"
    await child.close()


async def test_an_abandoned_fork_is_ended(pool, session):
    await output_of(session, "x = 1")
    connection, made = session._connection, []
    fork, connection.fork = connection.fork, lambda: made.append(fork()) or made[0]
    forking = asyncio.create_task(session.fork())
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    deadline = time.monotonic() + 120
    while not made or made[0]._channel.fileno() >= 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    connection.fork = fork
    assert await output_of(session, "print(x)") == "1"


async def test_forks_of_forks_and_several_of_one_are_separate(session):
    await output_of(session, "x = ['root']")
    first, second = await session.fork(), await session.fork()
    await output_of(first, "x.append('first')")
    third = await first.fork()
    everyone = (session, first, second, third)
    for number, one in enumerate(everyone):
        await output_of(one, f"x.append({number})")
    await session.close()
    await first.close()  # its state was the third's parent
    assert await output_of(second, "print(x)") == "['root', 2]"
    assert await output_of(third, "print(x)") == "['root', 'first', 3]"
    await second.close()
    await third.close()


async def test_random_generators_go_on_alike_in_a_fork(session):
    await output_of(session, "import random; random.seed(3); random.random()")
    child = await session.fork()
    draw = "print(random.random(), random.Random(random.random()).random())"
    assert await output_of(child, draw) == await output_of(session, draw)
    await child.close()


async def test_a_fork_has_a_loopback_of_its_own(session):
    await output_of(
        session,
        "import socket\n"
        "def hear(): return socket.create_server(('127.0.0.1', 5000))\n"
        "def knock():\n    try: socket.create_connection(('127.0.0.1', 5000), 1); return 'in'\n"
        "    except OSError as error: return type(error).__name__\n"
        "kept = hear()",
    )
    assert await output_of(session, "print(knock())") == "in"
    child = await session.fork()
    assert await output_of(child, "print(knock())") == "ConnectionRefusedError"
    assert await output_of(child, "own = hear(); print(knock())") == "in"
    await child.close()


async def test_files_held_open_are_not_separated(session):
    await output_of(session, "f = open('f', 'w+'); f.write('abc'); f.flush(); f.seek(0)")
    child = await session.fork()
    assert await output_of(child, "print(f.read(1))") == "a"
    await output_of(child, "import os; os.lseek(f.fileno(), 2, 0)")
    assert await output_of(session, "import os; print(os.read(f.fileno(), 1))") == "b'c'"
    await child.close()


async def test_threads_and_open_descriptors_do_not_stop_a_fork(session):
    await output_of(
        session,
        "import os, threading, time\n"
        "threading.Thread(target=lambda: time.sleep(60), daemon=True).start()\n"
        "files = []\nwhile True:\n    try: files.append(os.open('/dev/null', 0))\n"
        "    except OSError: break\nx = 5",
    )
    child = await session.fork()
    assert await output_of(child, "print(x, threading.active_count())") == "5 1"
    assert await output_of(session, "print(x)") == "5"
    await child.close()


PRINT_DURING_FORK = """
import io, os, sys, threading
class Output(io.RawIOBase):
    def writable(self): return True
    def write(self, data):
        if threading.current_thread() is not threading.main_thread():
            writes.set()
            cloned.wait()
        return os.write(1, data)
writes, cloned = threading.Event(), threading.Event()
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Output()))
def start_to_print():
    threading.Thread(target=lambda: print('x', flush=True), daemon=True).start()
    writes.wait()
os.register_at_fork(before=start_to_print, after_in_parent=cloned.set)
"""


async def test_a_fork_prints_though_a_thread_of_its_parent_was_printing(session):
    await output_of(session, PRINT_DURING_FORK)
    child = await session.fork()
    for fork in (child, session):
        assert await output_of(fork, "print(5)") == "5"
    await child.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", ToolStatus.timeout),
        ("import os; os._exit(3)", ToolStatus.user_error),
        ("import ctypes; ctypes.string_at(0)", ToolStatus.user_error),
    ],
)
async def test_lost_state_is_reported_once(session, code, status):
    await output_of(session, "x = 1")
    # Longer where the code ends by itself, however slow the machine.
    timeout_s = 0.3 if status is ToolStatus.timeout else 120.0
    assert (await session.run(code, timeout_s)).status is status
    fresh = await session.run("print('x' in dir())")
    assert fresh.state_lost
    assert fresh.output == f"{STATE_LOST_NOTE}\nFalse"
    again = await session.run("print(2)")
    assert not again.state_lost
    assert again.output == "2"


async def test_cancelling_ends_the_call_at_once(pool, session):
    code, name = named("import time; time.sleep(600)")
    running = asyncio.create_task(session.run(code, 600))
    await asyncio.to_thread(wait_until_running, name)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = await asyncio.gather(session.run("print(1)"), pool.run("print(2)"))
    assert after[0].state_lost
    assert after[1].output == "2"


async def test_a_lost_sandbox_is_an_infra_error_and_nothing_runs_again():
    async with running_pool(mode=PythonMode.stateful) as pool:
        session = await pool.open()
        await output_of(session, "x = 1")
        (sandbox,) = pool._sandboxes
        inner = descendants(sandbox.pid)
        os.kill(sandbox.pid, signal.SIGKILL)
        assert not wait_until_gone(inner)
        for _ in range(2):
            assert (await session.run("print(x)")).status is ToolStatus.infra_error
        with pytest.raises(RuntimeError):
            await session.fork()
        await session.close()
        other = await pool.open()
        assert await output_of(other, "print(1)") == "1"
        assert pool.num_replaced == 1
    assert (await other.run("print(1)")).status is ToolStatus.infra_error


@pytest.mark.parametrize(
    ("loses", "status"),
    [("supervisor", ToolStatus.user_error), ("sandbox", ToolStatus.infra_error)],
)
async def test_a_session_lost_alone_during_a_call_is_the_policys(loses, status):
    """Nothing in a session can end the whole sandbox, but it can be ended with its own group."""
    async with running_pool(mode=PythonMode.stateful) as pool:
        session = await pool.open()
        await output_of(session, "x = 1")
        code, name = named("import time; time.sleep(600)")
        call = asyncio.create_task(session.run(code, 600.0))
        await asyncio.to_thread(wait_until_running, name)
        (sandbox,) = pool._sandboxes
        (pid,) = pids_named(name)
        lost = int(stat_fields(pid)[1]) if loses == "supervisor" else sandbox.pid
        os.kill(lost, signal.SIGKILL)
        for result in [await call, await session.run("print(1)")]:
            assert result.status is status
            assert "lost" in result.output


async def test_sessions_need_their_mode():
    async with running_pool() as pool:
        with pytest.raises(ConfigError) as caught:
            await pool.open()
        assert caught.value.key == "tool.python.mode"

"""Two at once: neither ends, reads or talks to the other (starving: `test_bombs`)."""

import asyncio
import os
import subprocess
import sys

import pytest

from mega_agentrl.runtime.free_port import free_port
from tests.escape.outside import outside, with_values
from tests.sandbox.sandboxes import wait_until_running

KILL_RANGE = """
import os, signal
sent = 0
for pid in pids:
    if pid in (os.getpid(), 1):
        continue
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number)
            sent += 1
        except OSError:
            pass
print('sent', sent)
"""

LOOK_INTO = """
import os
seen = 0
for pid in [*filter(str.isdigit, os.listdir('/proc')), *map(str, pids)]:
    if pid == os.readlink('/proc/self'):
        continue
    for name in ('environ', 'maps', 'mem', 'fd/0', 'root/tmp', 'cwd/note', 'ns/user', 'exe'):
        path = f'/proc/{pid}/{name}'
        try:
            if name in ('ns/user', 'exe', 'fd/0'):
                seen += bool(os.readlink(path))
            else:
                seen += bool(os.listdir(path) if name == 'root/tmp' else open(path).read(1))
        except (OSError, UnicodeDecodeError):
            pass
print('seen', seen)
"""
WAIT = """
import time
open('/proc/self/comm', 'w').write(name)
time.sleep(wait_s)
open('/proc/self/comm', 'w').write('done')
print('still here')
"""

LISTEN = """
import socket
open('/tmp/mine', 'w').write('mine')
open('/dev/shm/mine', 'w').write('mine')
tcp = socket.create_server(('127.0.0.1', port))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind(name)
abstract.listen()
print('listening')
"""

REACH = """
import os, socket
found = []
for family, address in ((socket.AF_INET, ('127.0.0.1', port)), (socket.AF_UNIX, name)):
    try:
        link = socket.socket(family)
        link.settimeout(60)
        link.connect(address)
        found.append(str(address))
    except OSError:
        pass
found += [path for path in ('/tmp/mine', '/dev/shm/mine') if os.path.exists(path)]
print(len(found), *found)
"""

SHARE = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(key, 4096, 0o1666 if make else 0), libc.msgget(key, 0o1666 if make else 0))
"""


@pytest.fixture
async def two(stateless_pool, pool, mode):
    """Two runners of code that work at the same time."""
    if mode == "stateless":
        yield stateless_pool, stateless_pool
        return
    both = await pool.open(), await pool.open()
    yield both
    await end(*both)


async def end(*runners):
    for runner in runners:
        await runner.close()


@pytest.mark.parametrize(
    "mode", [pytest.param("stateless", marks=pytest.mark.extended), "stateful"]
)
async def test_a_sibling_cannot_be_killed_or_seen(two, tmp_path, marker, mode):
    wait = with_values(WAIT, name=marker, wait_s=600)
    with subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE) as other:
        look = outside(with_values(LOOK_INTO, pids=[other.pid]), tmp_path)
        assert int(look.split()[1]) >= 6
        assert outside(with_values(KILL_RANGE, pids=[other.pid]), tmp_path) == "sent 2"
        assert other.communicate(timeout=300)[0] == b""
    attack = with_values(KILL_RANGE, pids=[-1, *range(2, 600)])
    victim, attacker = two
    wait = with_values(WAIT, name=marker, wait_s=0.5)
    running = asyncio.create_task(victim.run(wait))
    await asyncio.to_thread(wait_until_running, marker)
    results = [await attacker.run(attack) for _ in range(3)]
    assert (await running).output == "still here"
    # kill(-1) leaves out the caller and process 1: there is nobody else.
    assert {result.output for result in results} <= {"sent 0"}
    assert (await attacker.run(with_values(LOOK_INTO, pids=[]))).output == "seen 0"


async def test_a_fork_and_its_parent_cannot_kill_or_see_each_other(pool, marker):
    parent = await pool.open()
    assert (await parent.run("x = [1]; print(x)")).output == "[1]"
    child = await parent.fork()
    other = await parent.fork()
    attack = with_values(KILL_RANGE, pids=[-1, *range(2, 600)])
    families = [parent, child, other]
    for attacker in families:
        victims = [session for session in families if session is not attacker]
        wait = with_values(WAIT, name=marker, wait_s=0.3)
        running = [asyncio.create_task(victim.run(wait)) for victim in victims]
        await asyncio.to_thread(wait_until_running, marker, 2)
        assert (await attacker.run(attack)).output == "sent 0"
        assert [(await task).output for task in running] == ["still here"] * 2
        look = with_values(LOOK_INTO, pids=[])
        assert (await attacker.run(look)).output == "seen 0"
    for session in families:
        assert (await session.run("print(x)")).output == "[1]"
    await end(*families)


@pytest.mark.parametrize(
    "relation", [pytest.param("strangers", marks=pytest.mark.extended), "family"]
)
async def test_a_sibling_cannot_be_reached(pool, tmp_path, relation):
    names = {"port": free_port(), "name": f"\0escape-sibling{os.getpid()}"}
    code = with_values(LISTEN.replace("/tmp/", "").replace("/dev/shm/", "other-"), **names)
    reach = with_values(REACH.replace("/tmp/", "").replace("/dev/shm/", "other-"), **names)
    assert outside(code + reach, tmp_path).splitlines()[-1].startswith("4 ")
    listener = await pool.open()
    other = await (listener.fork() if relation == "family" else pool.open())
    assert (await listener.run(with_values(LISTEN, **names))).output == "listening"
    assert (await other.run(with_values(REACH, **names))).output == "0"
    assert (await listener.run(with_values(REACH, **names))).output.startswith("4 ")
    await end(listener, other)


@pytest.mark.parametrize(
    "mode", ["stateless", pytest.param("stateful", marks=pytest.mark.extended), "family"]
)
async def test_shared_memory_is_not_that_of_a_sibling(two, tmp_path, mode):
    key = 0x6500_0000 + os.getpid()
    make, look = (with_values(SHARE, key=key, make=make) for make in (True, False))
    assert "-1" not in outside(make, tmp_path).split()
    assert "-1" not in outside(look, tmp_path).split()
    subprocess.run(["ipcrm", "-M", str(key), "-Q", str(key)], check=True)
    maker, other = two
    if mode == "family":
        other = await maker.fork()
    assert "-1" not in (await maker.run(make)).output.split()
    for _ in range(2):
        assert (await other.run(look)).output == "-1 -1"
    if mode == "family":
        await end(other)


@pytest.mark.parametrize("mode", ["stateless", "stateful"])
async def test_files_of_a_sibling_are_not_there(two, pool, mode):
    first, second = two
    for folder in ("/tmp", "/dev/shm"):
        assert (await first.run(f"open('{folder}/note', 'w').write('1'); print(1)")).output == "1"
        for runner in (second, second, pool):
            seen = await runner.run(f"import os; print(os.listdir('{folder}'))")
            assert seen.output == "[]"

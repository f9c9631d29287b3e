"""The pool from outside: what runs, what it cannot do, and what happens when it breaks."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pyseccomp
import pytest

from mega_agentrl.config.enums import PythonMode, SandboxIsolation
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox import client
from mega_agentrl.sandbox import pool as pool_module
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.sandbox.process import kill_child, start_child
from mega_agentrl.types.records import ToolStatus
from tests.processes import descendants, wait_until_gone
from tests.sandbox.sandboxes import named, wait_until_running

TIMEOUT_S = 10.0


async def started_pool(**changes):
    values = {
        "num_workers": 2,
        "timeout_s": TIMEOUT_S,
        "memory_limit_mib": 256,
        "preload_modules": [],
    }
    pool = SandboxPool(PythonToolConfig(**(values | changes)))
    await pool.start()
    return pool


def make_pool(**changes):
    return asyncio.run(started_pool(**changes))


@pytest.fixture(scope="module")
def pool():
    made = make_pool()
    yield made
    made.close_now()


async def is_healthy(pool):
    results = await asyncio.gather(*(pool.run(f"print({i})") for i in range(4)))
    return [result.output for result in results] == ["0", "1", "2", "3"]


async def test_statuses_and_outputs(pool):
    ok = await pool.run("import sys; print('a'); print('b', file=sys.stderr)")
    assert (ok.status, ok.output) == (ToolStatus.ok, "a")
    failed = await pool.run("print('a')\nraise ValueError('boom')")
    assert failed.status is ToolStatus.user_error
    assert failed.output == (
        'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\n'
        "ValueError: boom"
    )
    left = await pool.run("import sys; print('a'); sys.exit(3)")
    assert (left.status, left.output) == (ToolStatus.user_error, "")
    said = await pool.run("raise SystemExit('bye')")
    assert (said.status, said.output) == (ToolStatus.user_error, "bye")
    broken = await pool.run("def f(:")
    assert broken.output.endswith("SyntaxError: invalid syntax")
    crashed = await pool.run("import ctypes; ctypes.string_at(0)")
    assert crashed.output.startswith("Killed by signal 11")


async def test_behaves_as_python_c(pool):
    assert (await pool.run("print(__name__)")).output == "__main__"
    late = "import atexit, threading, time\natexit.register(print, 'exit')\n"
    late += "threading.Thread(target=lambda: (time.sleep(.2), print('thread'))).start()"
    assert (await pool.run(late)).output == "thread\nexit"
    unflushed = "import sys; sys.stdout.write('no newline')"
    assert (await pool.run(unflushed)).output == "no newline"
    assert (await pool.run("print('é\\u4e2d')")).output == "é中"
    assert (await pool.run("import random; print(random.random())")).output != (
        await pool.run("import random; print(random.random())")
    ).output


async def test_a_forked_child_that_comes_to_its_end_just_ends(pool):
    code = "import os, time\nif os.fork(): time.sleep(0.3); print('parent')"
    assert (await pool.run(code)).output == "parent"


async def test_cancelling_ends_the_call_at_once(pool):
    code, name = named("while True: pass")
    running = [asyncio.create_task(pool.run(code, 600)) for _ in range(4)]
    await asyncio.to_thread(wait_until_running, name, 2)
    for call in running:  # two run, two wait for a sandbox
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(call.cancelled() for call in running)
    assert await is_healthy(pool)


async def test_cpu_time_is_limited():
    pool = await started_pool(num_workers=1, timeout_s=0.3)
    try:
        result = await pool.run("while True: pass", 60.0)
    finally:
        await pool.close()
    assert result.status is ToolStatus.timeout
    assert "limit of CPU time" in result.output


async def test_without_isolation_it_warns_and_works(caplog, tmp_path):
    target = tmp_path / "written"
    pool = await started_pool(num_workers=1, isolation=SandboxIsolation.none)
    try:
        await pool.run(f"open({str(target)!r}, 'w').close()")
        late = await pool.run("while True: pass", 0.3)
    finally:
        await pool.close()
    assert target.exists()
    assert late.status is ToolStatus.timeout
    assert caplog.text.count("WITHOUT ANY ISOLATION") == 1


async def test_sessions_without_isolation():
    pool = await started_pool(
        num_workers=1, isolation=SandboxIsolation.none, mode=PythonMode.stateful
    )
    try:
        session = await pool.open()
        await session.run("x = [1]; open('f', 'w').write('a')")
        child = await session.fork()
        await child.run("x.append(2); open('f', 'a').write('b')")
        look = "print(x, open('f').read())"
        assert (await child.run(look)).output == "[1, 2] ab"
        assert (await session.run(look)).output == "[1] a"
        everyone = [pid for box in pool._sandboxes for pid in descendants(box.pid)]
        assert len(everyone) >= 4  # the spare one, one that is retired, two that live
    finally:
        await pool.close()
    assert not wait_until_gone(everyone)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1); os.close(2); time.sleep(60)",
        "import os, time\nif os.fork(): time.sleep(60)\nos.setsid(); time.sleep(60)",
        "while True: print('x' * 65536)",
    ],
)
async def test_deadline(pool, code):
    begin = time.monotonic()
    result = await pool.run(code, 0.25)
    assert result.status is ToolStatus.timeout
    assert result.output == "Timed out after 0.25 s."
    assert time.monotonic() - begin < 20
    assert await is_healthy(pool)


async def test_nothing_is_left_behind(pool):
    marker = f"left{os.getpid()}"
    code = (
        f"import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 30 # {marker}'])\nprint(1)"
    )
    assert (await pool.run(code)).output == "1"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if marker.encode() in command]


async def test_calls_share_no_files(pool):
    for folder in ("/tmp", "/dev/shm", "."):
        write = f"open('{folder}/note', 'w').write('x'); print(open('{folder}/note').read())"
        assert (await pool.run(write)).output == "x"
        for _ in range(3):
            listing = f"import os; print(os.path.exists('{folder}/note'))"
            assert (await pool.run(listing)).output == "False"


async def test_file_system_is_read_only_and_empty_of_ours(pool):
    for target in ("/x", "/usr/x", f"{sys.prefix}/x", "/sandbox/mega_agentrl/x", "/dev/x"):
        result = await pool.run(f"open({target!r}, 'w')")
        assert result.status is ToolStatus.user_error, target
    secret = Path(__file__)
    result = await pool.run(f"print(open({str(secret)!r}).read())")
    assert result.output.startswith("Traceback")
    assert (await pool.run("import os; print(os.listdir('/etc'))")).output.count("passwd") == 0


async def test_no_network(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()  # works outside
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        result = await pool.run(code)
    assert result.output.endswith("Connection refused")


async def test_no_environment_no_capabilities(pool, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert "SECRET" not in (await pool.run("import os; print(dict(os.environ))")).output
    assert (
        "SECRET"
        not in (await pool.run("print(open('/proc/1/environ', errors='ignore').read())")).output
    )
    status = (await pool.run("print(open('/proc/self/status').read())")).output
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert f"{name}:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    mount = "import ctypes; print(ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, None))"
    assert (await pool.run(mount)).output == "-1"


async def test_processes_outside_are_out_of_reach(pool):
    victim = start_child(["/bin/sleep", "30"])
    codes = [f"import os; os.kill({victim.pid}, 9)", "import os; os.kill(-1, 9)"]
    for code in codes:
        await pool.run(code)
    assert victim.poll() is None
    kill_child(victim)
    assert await is_healthy(pool)


async def test_limits(pool):
    memory = await pool.run("x = bytearray(10**9)")
    assert memory.output.endswith("MemoryError")
    bomb = await pool.run("import os\nwhile True: os.fork()", 5.0)
    assert bomb.status in (ToolStatus.user_error, ToolStatus.timeout)
    large = await pool.run("open('a', 'wb').write(b'x' * (1 << 27))")
    assert large.status is ToolStatus.user_error
    many = await pool.run("files = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in many.output
    assert await is_healthy(pool)


async def test_long_output_is_cut_with_a_note(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_OUTPUT_CHARS", 100)
    pool = await started_pool(num_workers=1)
    try:
        long = await pool.run("print('a' * 150)")
        assert long.output == "a" * 100 + "\n[50 more characters cut]"
        flood = await pool.run("print('a' * 10**6)")
        assert flood.output.startswith("a" * 100 + "\n[")
        assert len(flood.output) < 200
        failed = await pool.run("raise ValueError('b' * 10**5 + 'end')")
        assert failed.output.endswith("bend")
        assert len(failed.output) < 200
    finally:
        await pool.close()


async def test_preloaded_modules_are_there_and_random_differs():
    pool = await started_pool(num_workers=1, preload_modules=["numpy"])
    try:
        code = "import sys; print('numpy' in sys.modules)"
        assert (await pool.run(code)).output == "True"
        draws = {(await pool.run("import numpy; print(numpy.random.rand())")).output for _ in "ab"}
        assert len(draws) == 2
    finally:
        await pool.close()


def test_a_missing_preload_module_fails_at_start_naming_it():
    with pytest.raises(ValueError, match=r"no_such_module.*preload"):
        make_pool(num_workers=1, preload_modules=["no_such_module"])


async def test_lost_sandbox_is_replaced_and_runs_nothing_twice(pool):
    sandbox = pool._idle[-1]
    inner = descendants(sandbox.pid)
    os.kill(sandbox.pid, signal.SIGKILL)
    assert not wait_until_gone(inner)
    before = pool.num_replaced
    results = [await pool.run(f"print({i})") for i in range(3)]
    assert [result.output for result in results] == ["0", "1", "2"]  # not started: repeated
    assert pool.num_replaced == before + 1
    code, name = named("import time; time.sleep(600)")
    running = asyncio.create_task(pool.run(code, 600))
    await asyncio.to_thread(wait_until_running, name)
    busy = next(box for box in pool._sandboxes if box not in pool._idle)
    os.kill(busy.pid, signal.SIGKILL)
    lost = await running
    assert lost.status is ToolStatus.infra_error  # it had started
    assert await is_healthy(pool)


async def test_hung_supervisor_is_infra_error(monkeypatch):
    pool = await started_pool(num_workers=1)
    grace_s = client._REPLY_GRACE_S
    monkeypatch.setattr(client, "_REPLY_GRACE_S", 1.0)
    try:
        code, name = named("import time; time.sleep(600)")
        running = asyncio.create_task(pool.run(code, 1.0))
        await asyncio.to_thread(wait_until_running, name)
        (sandbox,) = pool._sandboxes
        inner = descendants(sandbox.pid)
        for pid in inner:
            os.kill(pid, signal.SIGSTOP)
        assert (await running).status is ToolStatus.infra_error
        monkeypatch.setattr(client, "_REPLY_GRACE_S", grace_s)
        assert (await pool.run("print(1)")).output == "1"
        assert not wait_until_gone(inner)
    finally:
        await pool.close()


def test_close_ends_everything_at_once():
    pool = make_pool()
    outer = [box.pid for box in pool._sandboxes]
    inner = [pid for root in outer for pid in descendants(root)]
    assert len(inner) >= 4
    results = []
    code, name = named("import time; time.sleep(600)")

    def call_from_another_loop():
        results.append(asyncio.run(pool.run(code, 600)))

    threads = [threading.Thread(target=call_from_another_loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until_running(name, 2)
    pool.close_now()
    for thread in threads:
        thread.join(60)
    assert [result.status for result in results] == [ToolStatus.infra_error] * 4
    assert not wait_until_gone((*outer, *inner))
    pool.close_now()
    assert asyncio.run(pool.run("print(1)")).status is ToolStatus.infra_error


def test_sandboxes_die_with_their_owner():
    program = (
        "import asyncio, os, time\n"
        "from mega_agentrl.config.sections.tools import PythonToolConfig\n"
        "from mega_agentrl.sandbox.pool import SandboxPool\n"
        "pool = SandboxPool(PythonToolConfig(num_workers=1, preload_modules=[]))\n"
        "asyncio.run(pool.start())\n"
        "print(*(box.pid for box in pool._sandboxes), flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(pool_module.__file__).parents[2]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        (pid,) = owner.stdout.readline().split()
        owner.kill()
    assert not wait_until_gone([int(pid)])


async def test_many_concurrent_calls(pool):
    results = await asyncio.gather(*(pool.run(f"print({i} * {i})") for i in range(100)))
    assert [result.output for result in results] == [str(i * i) for i in range(100)]


AS_A_USER = """
import asyncio
from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox.pool import SandboxPool

async def main():
    for mode in PythonMode:
        pool = SandboxPool(PythonToolConfig(num_workers=1, preload_modules=[], mode=mode))
        await pool.start()
        for code in ("print(6 * 7)", "import os\\nwhile True: os.fork()"):
            print((await pool.run(code)).status.value)
        if mode is PythonMode.stateful:
            session = await pool.open()
            await session.run("x = 5; open('f', 'w').write('g')")
            print((await (await session.fork()).run("print(x, open('f').read())")).output)
        await pool.close()

asyncio.run(main())
"""


def test_works_for_a_launcher_that_is_not_root():
    if os.getuid():
        pytest.skip("the other tests run as a user already")
    package = Path(pool_module.__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        shutil.copytree(package, Path(folder, package.name))
        shutil.copy(pyseccomp.__file__, folder)
        os.chmod(folder, 0o755)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": folder}
        python = [*user, "/usr/bin/python3", "-B", "-c"]
        if subprocess.run([*python, "import asyncio, ctypes"], env=environment).returncode:
            pytest.skip("needs a system Python")
        run = subprocess.run(
            [*python, AS_A_USER], env=environment, capture_output=True, text=True, timeout=90
        )
    assert run.stdout.split("\n")[:-1] == [*["ok", "user_error"] * 2, "5 g"], run.stderr

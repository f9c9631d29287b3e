"""Commands in a sandbox: pipes, network, forwarded ports, and how they end."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.errors import InputError
from mega_agentrl.sandbox import command as command_module
from mega_agentrl.sandbox.command import CommandStartError, SandboxedCommand, start
from tests.escape.outside import vanish
from tests.sandbox.sandboxes import named, wait_until_running

ROOT = Path(__file__).parents[2]
both_isolations = pytest.mark.parametrize(
    "isolation",
    [
        SandboxIsolation.bubblewrap,
        pytest.param(SandboxIsolation.none, marks=pytest.mark.extended),
    ],
)
DEADLINE_S = 120.0


@asynccontextmanager
async def running(*command, **options):
    """A started command, which is killed with the block."""
    process = await start(SandboxedCommand(command=command, **options))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        await process.kill()


def python(code):
    return ("python", "-c", code)


def starting(code):
    """A command that runs `code` in a child of its own."""
    return python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")


@both_isolations
async def test_pipes_environment_and_exit_code_are_those_of_the_command(isolation):
    script = 'read line; echo "got $line in $PLACE"; echo note >&2; exit 3'
    options = {"isolation": isolation, "environment": {"PLACE": "here"}}
    async with running("sh", "-c", script, **options) as process:
        process.stdin.write(b"hello\n")
        assert await process.stdout.read() == b"got hello in here\n"
        assert await process.wait() == process.returncode == 3
        assert process.stderr_tail() == "note"


@both_isolations
async def test_a_signal_is_reported_as_a_shell_does(isolation):
    async with running("sh", "-c", "kill -SEGV $$", isolation=isolation) as process:
        assert await process.wait() == 128 + signal.SIGSEGV


async def test_without_network_the_host_cannot_be_reached():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 60); print('reached')"
    async with server:
        async with running(*python(code)) as process:
            assert await process.wait() == 1
            assert "ConnectionRefusedError" in process.stderr_tail()
        async with running(*python(code), network=NetworkAccess.host) as process:
            assert await process.stdout.read() == b"reached\n"


async def test_a_forwarded_port_streams_and_keeps_the_exit_code(tmp_path):
    first_chunk_was_read = asyncio.Event()

    async def answer(reader, writer):
        request = await reader.read()  # until the client closes its side
        writer.write(b"one\n")
        await asyncio.wait_for(first_chunk_was_read.wait(), DEADLINE_S)
        writer.write(request)
        writer.close()

    path = tmp_path / "server"
    server = await asyncio.start_unix_server(answer, path)
    path.chmod(0o666)
    code = """if True:
        import socket, sys
        connection = socket.create_connection(("127.0.0.1", 8080))
        connection.sendall(b"two" * 100_000)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb")
        print(answer.readline(), flush=True)
        print(len(answer.read()), flush=True)
        sys.exit(7)"""
    async with server, running(*python(code), forwarded_ports={8080: path}) as process:
        assert await process.stdout.readline() == b"b'one\\n'\n"
        first_chunk_was_read.set()
        assert await process.stdout.readline() == b"300000\n"
        assert await process.wait() == 7


async def test_connections_to_a_forwarded_port_are_independent(tmp_path):
    async def answer(reader, writer):
        writer.write(b"to " + await reader.readline())
        writer.close()

    path = tmp_path / "server"
    server = await asyncio.start_unix_server(answer, path)
    path.chmod(0o666)
    code = """if True:
        import socket
        addresses = [("127.0.0.1", 8080 + number % 2) for number in range(40)]
        connections = [socket.create_connection(address) for address in addresses]
        for number, connection in reversed(list(enumerate(connections))):
            connection.sendall(b"%d\\n" % number)
            connection.shutdown(socket.SHUT_WR)
        for number, connection in enumerate(connections):
            assert connection.makefile("rb").read() == b"to %d\\n" % number, number
        print("all")"""
    ports = {8080: path, 8081: path}
    async with server, running(*python(code), forwarded_ports=ports) as process:
        assert await process.stdout.read() == b"all\n", process.stderr_tail()
        await process.wait()
        assert process.stderr_tail() == ""


async def test_forwarded_connections_that_are_open_at_once_are_at_most_128(tmp_path):
    num_open, peak = 0, 0

    async def answer(reader, writer):
        nonlocal num_open, peak
        num_open += 1
        peak = max(peak, num_open)
        writer.write(b"open\n")
        await reader.read()
        writer.close()
        num_open -= 1

    path = tmp_path / "server"
    server = await asyncio.start_unix_server(answer, path)
    path.chmod(0o666)
    code = """if True:
        import socket
        def ask():
            connection = socket.create_connection(("127.0.0.1", 8080))
            try:
                return connection, connection.recv(9)
            except ConnectionError:
                return connection, b""
        asked = [ask() for _ in range(140)]
        print(sum(answer == b"open\\n" for _, answer in asked), flush=True)
        for connection, _ in asked:
            connection.close()
        while not ask()[1]:
            pass
        print("again")"""
    async with server, running(*python(code), forwarded_ports={8080: path}) as process:
        assert await process.stdout.read() == b"128\nagain\n", process.stderr_tail()
        await process.wait()
    assert peak == 128


async def test_a_socket_that_the_sandbox_may_not_use_is_named(tmp_path):
    path = tmp_path / "server"
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), path)
    path.chmod(0o400)
    command = SandboxedCommand(command=("true",), forwarded_ports={8080: path})
    async with server:
        with pytest.raises(CommandStartError) as caught:
            await start(command)
    assert str(path) in caught.value.reason


async def test_a_command_sees_and_changes_only_listed_paths(tmp_path):
    folders = {name: tmp_path / name for name in ("seen", "hidden", "shared")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "file").write_text("text")
    folders["shared"].chmod(0o777)
    script = f"cd {tmp_path}; ls; cat seen/file; echo x > seen/new; echo x > shared/new"
    options = {"read_only": (folders["seen"],), "writable": (folders["shared"],)}
    async with running("sh", "-c", script, **options) as process:
        assert await process.stdout.read() == b"seen\nshared\ntext"
        await process.wait()
        assert "seen/new" in process.stderr_tail()
    assert (folders["shared"] / "new").exists()
    assert not (folders["seen"] / "new").exists()


@both_isolations
async def test_kill_ends_what_the_command_started(isolation):
    code, name = named("import time; time.sleep(300)")
    async with running(*starting(code), isolation=isolation) as process:
        await asyncio.to_thread(wait_until_running, name)
        await asyncio.gather(process.kill(), process.wait(), process.kill())
        assert process.returncode == 128 + signal.SIGKILL
    assert vanish(name)


async def test_processes_that_a_command_left_behind_end_with_it():
    code, name = named("import time; print(flush=True); time.sleep(300)")
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"{code!r}], start_new_session=True, stdout=subprocess.PIPE); child.stdout.readline()"
    )
    async with running(*python(script)) as process:
        assert await process.wait() == 0
    assert vanish(name)


@both_isolations
def test_a_command_ends_with_its_parent(isolation):
    code, name = named("import time; time.sleep(300)")
    launcher = f"""if True:
        import asyncio
        from mega_agentrl.sandbox.command import SandboxedCommand, start
        async def main():
            command = {starting(code)!r}
            await start(SandboxedCommand(command=command, isolation={isolation.value!r}))
            await asyncio.sleep(300)
        asyncio.run(main())"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", launcher], env=environment)
    try:
        wait_until_running(name)
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
    assert vanish(name)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        pytest.param(("no-such-program",), {}, ["no-such-program", "PATH="], id="program"),
        pytest.param(("true",), {"working_folder": ROOT / "docs"}, ["docs"], id="folder"),
        pytest.param(("true",), {"read_only": (Path("/nowhere"),)}, ["/nowhere"], id="bind"),
    ],
)
async def test_a_command_that_does_not_start_is_named(command, options, words):
    with pytest.raises(CommandStartError) as caught:
        await start(SandboxedCommand(command=command, **options))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param({"command": ()}, "command", id="no-command"),
        pytest.param({"network": NetworkAccess.host}, "forwarded_ports", id="network-of-the-host"),
        pytest.param({"isolation": SandboxIsolation.none}, "forwarded_ports", id="no-isolation"),
        pytest.param({"forwarded_ports": {80: Path("/s")}}, "forwarded_ports", id="low-port"),
    ],
)
def test_impossible_combinations_are_refused(options, name):
    with pytest.raises(InputError) as caught:
        SandboxedCommand(**{"command": ("true",), "forwarded_ports": {8080: Path("/s")}} | options)
    assert caught.value.name == name


async def test_a_flood_of_output_is_bounded():
    limit = 1 << 16
    command = SandboxedCommand(command=("sh", "-c", "yes error >&2 & exec yes | tr -d '\\n'"))
    process = await start(command, max_line_bytes=limit)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (len(process.stdout._buffer) > limit and process.stderr_tail()):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # more could come
        assert len(process.stdout._buffer) < 8 * limit
        assert len(process.stderr_tail()) <= 8192
        with pytest.raises(ValueError):  # a line longer than the limit
            await process.stdout.readline()
    finally:
        await process.kill()


async def test_memory_is_limited():
    code = "block = bytearray(512 << 20); print(len(block))"
    async with running(*python(code), memory_limit_mib=256) as process:
        assert await process.wait() != 0
    async with running(*python(code), memory_limit_mib=1024) as process:
        assert await process.wait() == 0


async def test_the_environment_is_not_in_any_command_line():
    secret = f"secret-{os.getpid()}"
    code = "import time; print(flush=True); time.sleep(300)"
    async with running(*python(code), environment={"TOKEN": secret}) as process:
        await process.stdout.readline()
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                lines.append(path.read_bytes())
    assert any(code.encode() in line for line in lines)
    assert not any(secret.encode() in line for line in lines)


async def test_a_launch_that_fails_leaves_no_descriptors_open(monkeypatch):
    def refuse(*args, **options):
        raise OSError("no process can be started")

    monkeypatch.setattr(command_module, "start_child", refuse)
    with pytest.raises(CommandStartError):  # caches are filled
        await start(SandboxedCommand(command=("true",)))
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CommandStartError):
            await start(SandboxedCommand(command=("true",)))
    assert len(os.listdir("/proc/self/fd")) <= len(before)

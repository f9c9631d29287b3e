"""Connections are bounded per client and in total, and end with their session."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from mega_agentrl.rollout.gateway import connections, server
from mega_agentrl.rollout.gateway.connections import raise_descriptor_limit
from mega_agentrl.rollout.gateway.http_log import MAX_LINES
from mega_agentrl.sandbox.command import SandboxedCommand, start
from tests.rollout.gateway.gateway_run import make_session_scope, open_gateway
from tests.rollout.gateway.test_bad_requests import BODIES, PoliteEngine

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def open_limited(monkeypatch, codec, *, total=100, per_owner=100, num_sessions=1):
    """A gateway with other bounds, and keys of sessions."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", total)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS_PER_OWNER", per_owner)
    async with open_gateway() as gateway:
        scopes = [make_session_scope(codec, PoliteEngine(codec)) for _ in range(num_sessions)]
        yield gateway, [gateway.open_session(scope)[0] for scope in scopes]


async def connect(gateway):
    port = int(gateway.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port)


async def ask(connection, key):
    """Status of a request on an open connection; 0 if it has been closed."""
    reader, writer = connection
    body = json.dumps(BODIES[CHAT])
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}"
    with suppress(ConnectionError):
        writer.write(f"{head}\r\n\r\n{body}".encode())
        line = await reader.readline()
        length = 0
        while (header := await reader.readline()).strip():
            if header.lower().startswith(b"content-length"):
                length = int(header.split()[1])
        await reader.readexactly(length)
        return int(line.split()[1]) if line else 0
    return 0


async def is_closed(connection):
    with suppress(ConnectionError):
        return await connection[0].read(1) == b""
    return True


async def test_client_with_the_most_connections_loses_one_for_a_new_client(monkeypatch, codec):
    opened = open_limited(monkeypatch, codec, total=8, num_sessions=2)
    async with opened as (gateway, (greedy, modest)):
        held = [await connect(gateway) for _ in range(8)]
        assert [await ask(item, greedy) for item in held] == [200] * 8
        new = [await connect(gateway) for _ in range(2)]
        assert [await ask(item, modest) for item in new] == [200] * 2
        assert await is_closed(held[0])
        assert await is_closed(held[1])
        assert [await ask(item, greedy) for item in held[2:]] == [200] * 6
        usage = gateway.usage()
        assert (usage.num_connections, usage.max_connections) == (8, 8)


async def test_silent_connections_do_not_keep_clients_out(monkeypatch, codec):
    async with open_limited(monkeypatch, codec, total=8) as (gateway, (key,)):
        silent = [await connect(gateway) for _ in range(20)]
        assert await ask(await connect(gateway), key) == 200
        assert await is_closed(silent[0])
        assert gateway.usage().num_connections <= 8


async def test_session_has_no_more_connections_than_its_bound(monkeypatch, codec):
    opened = open_limited(monkeypatch, codec, per_owner=4, num_sessions=2)
    async with opened as (gateway, (greedy, modest)):
        held = [await connect(gateway) for _ in range(5)]
        assert [await ask(item, greedy) for item in held] == [200] * 4 + [429]
        assert await ask(held[4], modest) == 200


async def test_connections_of_one_pool_for_several_sessions_have_no_bound_per_session(
    monkeypatch, codec
):
    opened = open_limited(monkeypatch, codec, per_owner=4, num_sessions=2)
    async with opened as (gateway, keys):
        for _ in range(10):
            connection = await connect(gateway)
            assert [await ask(connection, key) for key in keys] == [200, 200]


CLIENT = """
import resource, select, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address = sys.argv[1] if sys.argv[1].startswith("/") else ("127.0.0.1", int(sys.argv[1]))
family = socket.AF_UNIX if sys.argv[1].startswith("/") else socket.AF_INET
poll = select.poll()
held = [socket.socket(family) for _ in range(int(sys.argv[2]))]
for client in held:
    client.connect(address)
    poll.register(client, select.POLLIN)
num_open, num_expected = len(held), int(sys.argv[3])
while num_open > num_expected:
    for number, _ in poll.poll():
        poll.unregister(number)
        num_open -= 1
print("rest", num_open, flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def client_process(address, num_connections, num_expected):
    """A process that has opened connections, of which the expected number is left."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, address, str(num_connections), str(num_expected)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert await process.stdout.readline() == f"rest {num_expected}\n".encode()
    yield
    await process.communicate(b"")


async def test_process_has_no_more_connections_to_the_unix_socket_than_its_bound(
    monkeypatch, codec
):
    async with open_limited(monkeypatch, codec, per_owner=4) as (gateway, (key,)):
        async with client_process(str(gateway.socket_path), 12, 4):
            assert gateway.usage().num_connections == 4
            assert await ask(await connect(gateway), key) == 200


FORKING_CLIENT = """if True:
    import os, socket, sys
    def connect():
        client = socket.socket(socket.AF_UNIX)
        client.connect("/sandbox/sockets/8080")
        return client
    held = []
    for _ in range(4):  # past the program that forwards the port, from other processes
        if not os.fork():
            held = [connect() for _ in range(4)]
            sys.stdin.read()
            os._exit(0)
    print("forked", flush=True)
    sys.stdin.read()"""


async def test_all_processes_of_a_sandbox_have_one_bound_together(monkeypatch, codec):
    async with open_limited(monkeypatch, codec, per_owner=5) as (gateway, (key,)):
        command = SandboxedCommand(
            command=(sys.executable, "-I", "-c", FORKING_CLIENT),
            read_only=(Path(sys.base_prefix), Path(sys.prefix)),
            forwarded_ports={8080: gateway.socket_path},
        )
        process = await start(command)
        try:
            assert await process.stdout.readline() == b"forked\n", process.stderr_tail()
            while gateway.usage().num_connections < 5:
                await asyncio.sleep(0)
            await ask(await connect(gateway), key)  # later than all of them, in order
            assert gateway.usage().num_connections == 6
        finally:
            await process.kill()


async def test_connections_of_a_session_end_with_it(monkeypatch, codec):
    monkeypatch.setattr(connections, "CLOSE_DELAY_S", 0.0)
    opened = open_limited(monkeypatch, codec, num_sessions=2)
    async with opened as (gateway, (ended, other)):
        held = [await connect(gateway) for _ in range(5)]
        shared, foreign = await connect(gateway), await connect(gateway)
        assert [await ask(item, ended) for item in [*held, shared]] == [200] * 6
        assert [await ask(item, other) for item in (shared, foreign)] == [200] * 2
        await gateway.close_session(ended)
        assert all([await is_closed(item) for item in held])
        assert [await ask(item, other) for item in (shared, foreign)] == [200] * 2
        assert gateway.usage().num_connections == 2


async def test_unfinished_request_ends_with_its_session(monkeypatch, codec):
    monkeypatch.setattr(connections, "CLOSE_DELAY_S", 0.0)
    async with open_limited(monkeypatch, codec) as (gateway, (key,)):
        reader, writer = await connect(gateway)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode())
        while not gateway.usage().bytes_in_flight:
            await asyncio.sleep(0)
        await gateway.close_session(key)
        assert await is_closed((reader, writer))
        while gateway.usage().bytes_in_flight:
            await asyncio.sleep(0)


async def test_half_of_the_descriptors_is_left_for_the_run(monkeypatch, codec):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * num_used + 100, hard))
    try:
        async with open_limited(monkeypatch, codec, total=10_000) as (gateway, (key,)):
            limit = gateway.usage().max_connections
            assert limit == num_used + 50
            port = gateway.url.rpartition(":")[2]
            async with client_process(port, 3 * limit, limit):
                os.close(os.open("/dev/null", os.O_RDONLY))  # the run can open files
                assert await ask(await connect(gateway), key) == 200
                assert gateway.usage().num_connections == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_limit_of_descriptors_is_raised_but_never_lowered(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(connections, "MAX_DESCRIPTORS", before[0] - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 2, before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[0] - 1, before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_requests_that_are_no_http_write_a_bounded_number_of_lines(
    monkeypatch, codec, caplog
):
    async with open_limited(monkeypatch, codec) as (gateway, (key,)):
        for _ in range(MAX_LINES + 5):
            reader, writer = await connect(gateway)
            writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
        assert await ask(await connect(gateway), key) == 200
    lines = [record for record in caplog.records if record.name == server.__name__]
    assert len(lines) == MAX_LINES + 1
    assert not any(record.exc_info for record in lines)
    assert str(MAX_LINES + 5) in lines[-1].getMessage()


@pytest.mark.parametrize("content", [b"", b"{", b"\0\xff"], ids=["empty", "half", "bytes"])
async def test_body_with_broken_chunks_is_an_error_of_the_client(monkeypatch, codec, content):
    async with open_limited(monkeypatch, codec) as (gateway, (key,)):
        reader, writer = await connect(gateway)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"zz\r\n" + content)
        line = await reader.readline()
        assert b" 400 " in line

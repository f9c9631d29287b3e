"""The example server in a file of `tool.mcp`, and toolkits with its tools."""

import json
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import mcp_types
import pytest
from mcp.shared.memory import create_client_server_memory_streams
from mcp.shared.message import SessionMessage

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.tool.mcp.connection import McpConnection
from mega_agentrl.tool.mcp.listing import list_servers
from mega_agentrl.tool.mcp.server import AnswerLimits, make_tools
from mega_agentrl.tool.toolkit import ToolKit
from tests.fakes import CharCodec
from tests.tool.mcp import example_server

FOLDER = str(Path(__file__).parent)
EXAMPLE = {"command": "python", "args": ["example_server.py"], "cwd": FOLDER, "timeout_s": 60}
SECRET = "s3cret-of-the-example"
VARIABLES = {"EXAMPLE_TOKEN": SECRET}


def write_servers(folder, **servers):
    """Write a file with these servers and return its path."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


@contextmanager
def in_memory(server=example_server.server):
    """Let connections lead to a server in this process instead of starting one."""

    @asynccontextmanager
    async def transport(connection):
        async with (
            create_client_server_memory_streams() as (client_streams, server_streams),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_serve, server, *server_streams)
            yield client_streams
            tasks.cancel_scope.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(McpConnection, "_transport", transport)
        yield


class RawServer:
    """A server that lists these tools as they are, which the SDK's own would not send."""

    def __init__(self, tools):
        self._tools = tools

    def create_initialization_options(self):
        pass

    async def run(self, reader, writer, options):
        async for message in reader:
            request = message.message
            if not isinstance(request, mcp_types.JSONRPCRequest):
                continue
            result = {"tools": self._tools}
            if request.method == "initialize":
                result = {
                    "protocolVersion": request.params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "raw", "version": "1"},
                }
            answer = mcp_types.JSONRPCResponse(jsonrpc="2.0", id=request.id, result=result)
            await writer.send(SessionMessage(answer))


async def _serve(server, reader, writer):
    """Run a server until the other side ends, or the server cancels its `END_SCOPE`."""
    async with reader, writer:
        with anyio.CancelScope() as scope:
            example_server.END_SCOPE.set(scope)
            await server.run(reader, writer, server.create_initialization_options())


def list_example(folder, **changes):
    """The example server, listed without a process, with changes of its entry."""
    path = write_servers(folder, example=EXAMPLE | changes)
    with in_memory():
        return list_servers(path, VARIABLES)[0]


@contextmanager
def http_server():
    """The URL of an example server over streamable HTTP, which wants the secret as a token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, f"{FOLDER}/example_server.py", "--http", str(port)]
    child = subprocess.Popen(command, env={"TOKEN": SECRET})
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        child.kill()
        child.wait(300)


@asynccontextmanager
async def started_toolkit(listed, *, shows_images=True, max_tokens=200):
    """A started toolkit with the tools of a listed server."""
    limits = AnswerLimits(codec=CharCodec(), max_tokens=max_tokens, shows_images=shows_images)
    kit = ToolKit(make_tools(listed, limits), protocol=CallProtocol.hermes)
    await kit.start()
    try:
        yield kit
    finally:
        await kit.close()


@asynccontextmanager
async def opened(kit):
    """A session of a trajectory."""
    session = kit.open_session()
    await session.create({})
    try:
        yield session
    finally:
        await session.release()


async def answer(session, tool, **arguments):
    """Return the answer of a call."""
    return (await session.execute(tool, arguments)).answer

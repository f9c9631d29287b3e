"""The example server in a file of `tool.mcp`, and toolkits with its tools."""

import json
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from mega_agentrl.config.enums import CallProtocol
from mega_agentrl.tool.mcp.listing import list_servers
from mega_agentrl.tool.mcp.server import AnswerLimits, make_tools
from mega_agentrl.tool.toolkit import ToolKit
from tests.fakes import CharCodec

FOLDER = str(Path(__file__).parent)
EXAMPLE = {"command": "python", "args": ["example_server.py"], "cwd": FOLDER, "timeout_s": 20}
SECRET = "s3cret-of-the-example"
VARIABLES = {"EXAMPLE_TOKEN": SECRET}


def write_servers(folder, **servers):
    """Write a file with these servers and return its path."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return str(path)


def list_example(folder, variables=VARIABLES, **changes):
    """The example server, listed, with changes of its entry."""
    path = write_servers(folder, example=EXAMPLE | changes)
    return list_servers(path, variables)[0]


@contextmanager
def http_server():
    """The URL of an example server over streamable HTTP, which wants the secret as a token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, f"{FOLDER}/example_server.py", "--http", str(port)]
    child = subprocess.Popen(command, env={"TOKEN": SECRET})
    try:
        deadline = time.monotonic() + 60
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
        child.wait(30)


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

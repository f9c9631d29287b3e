"""Public MCP servers as tools of the run: each is a process in the sandbox."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from mega_agentrl.tool.mcp.listing import list_servers
from mega_agentrl.types.records import ToolStatus
from tests.tool.mcp.servers import opened, started_toolkit, write_servers

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]


async def call(folder, entry, tool, **arguments):
    """The answer of a tool of a server."""
    path = write_servers(folder, public={"timeout_s": 60} | entry)
    (listed,) = await asyncio.to_thread(list_servers, path, {})
    async with started_toolkit(listed, max_tokens=10_000) as kit, opened(kit) as session:
        outcome = await session.execute(tool, arguments)
    assert outcome.status is ToolStatus.ok, outcome.answer
    return outcome.answer


def python_server(python, module, *more, read_only=()):
    """An entry of the server file; the environment's own interpreter runs the module."""
    folders = [str(python.parents[1]), *read_only]
    return {"command": str(python), "args": ["-m", module, *more], "read_only": folders}


async def test_time_is_converted_between_zones(package, tmp_path):
    python = package("mcp-server-time", tried="MCP over stdio: convert_time")
    entry = python_server(python, "mcp_server_time", "--local-timezone", "UTC")
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    answer = json.loads(await call(tmp_path, entry, "convert_time", **arguments))
    assert "T21:00" in answer["target"]["datetime"]


async def test_log_of_a_repository_is_read(package, tmp_path):
    python = package("mcp-server-git", tried="MCP over stdio: git_log")
    tmp_path.chmod(0o755)
    repository = tmp_path / "repository"
    commit = "git -c user.name=a -c user.email=a@b commit --quiet --allow-empty --message=first"
    script = f"git init --quiet {repository} && cd {repository} && {commit}"
    subprocess.run(["bash", "-ec", script], check=True)
    trust = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory"}
    entry = python_server(python, "mcp_server_git", read_only=[str(repository)])
    entry["env"] = trust | {"GIT_CONFIG_VALUE_0": "*"}
    assert "first" in await call(tmp_path, entry, "git_log", repo_path=str(repository))


async def test_server_with_every_feature_answers(npm_package, tmp_path):
    folder = npm_package(
        "@modelcontextprotocol/server-everything", tried="MCP over stdio, node: echo, get-sum"
    )
    entry = {
        "command": "node",
        "args": [str(folder / "dist" / "index.js"), "stdio"],
        "read_only": [str(folder.parents[2])],
    }
    assert "hello" in await call(tmp_path, entry, "echo", message="hello")
    assert "5" in await call(tmp_path, entry, "get-sum", a=2, b=3)

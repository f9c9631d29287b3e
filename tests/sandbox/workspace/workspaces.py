"""Pools of workspaces, and a small root file system, for tests."""

import asyncio
import shutil
import subprocess
from pathlib import Path

from mega_agentrl.config.sections.tools import WorkspaceToolConfig
from mega_agentrl.sandbox.workspace.pool import WorkspacePool
from mega_agentrl.types.records import ToolStatus

PROGRAMS = ("bash", "cat", "ls", "mkdir", "mv", "rm", "sleep", "dd", "cp", "touch", "stat", "ln")


def make_root(folder):
    """Fill a folder with a root file system of a few programs; return it."""
    for program in PROGRAMS:
        path = Path(shutil.which(program)).resolve()
        libraries = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        files = {word for word in libraries.split() if word.startswith("/")}
        for name in (f"/usr/bin/{program}", *files):
            target = folder / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy2(path if name == f"/usr/bin/{program}" else name, target)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc/motd").write_text("a root of its own\n", encoding="ascii")
    return folder


def make_project(folder):
    """Fill a folder with the files of a small project; return it."""
    (folder / "src/deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "src/c.txt", "src/deep/d.txt"):
        (folder / name).write_text(f"{name} as it was\n", encoding="ascii")
    return folder


def shared_workspace_pool(**changes):
    """A started pool for a fixture of several tests."""
    values = {"root": "host", "timeout_s": 60.0, "disk_limit_mib": 32, "memory_limit_mib": 512}
    pool = WorkspacePool(WorkspaceToolConfig(**(values | changes)))
    asyncio.run(pool.start())
    yield pool
    pool.close_now()


async def output_of(session, command):
    """The output of a command that must succeed."""
    result = await session.run(command)
    assert result.status is ToolStatus.ok, result
    return result.output

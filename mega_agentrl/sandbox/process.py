"""Starts and kills the project's own child processes.

Linux delivers a child's parent-death signal when the *thread* that started it ends, not the
process. Therefore one thread that lives as long as this process starts all children: they die with
this process, and not when the thread of an event loop ends.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Child = subprocess.Popen[bytes]
DEVNULL = subprocess.DEVNULL
PIPE = subprocess.PIPE


@cache
def _spawn_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")


def start_child(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] = DEVNULL,
    stdout: int | IO[bytes] = DEVNULL,
    stderr: int | IO[bytes] = DEVNULL,
    pass_fds: Sequence[int] = (),
    new_group: bool = False,
) -> Child:
    """Start `command` (an absolute path and its arguments) with an empty environment.

    Args:
        command: The command.
        stdin: Descriptor, file or `PIPE`, as for `subprocess.Popen`.
        stdout: Likewise.
        stderr: Likewise.
        pass_fds: Further descriptors that the child inherits under the same numbers.
        new_group: Whether the child leads a process group of its own.

    Raises:
        OSError: The command cannot be started.
    """

    def start() -> Child:
        return subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={},
            cwd="/",
            pass_fds=pass_fds,
            process_group=0 if new_group else None,
        )

    return _spawn_executor().submit(start).result()


def read_log_tail(log: IO[bytes], max_bytes: int) -> str:
    """Return the end of a child's log as text, without surrounding white space."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - max_bytes))
    return log.read(max_bytes).decode("utf-8", "replace").strip()


def kill_child(child: Child, *, timeout_s: float = 5.0) -> None:
    """Kill the child and collect its exit status.

    Safe to call twice; never waits longer than `timeout_s`.
    """
    if child.poll() is None:
        child.kill()
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return  # it is blocked in the kernel and ends when its system call returns


def run_command(
    command: Sequence[str], *, timeout_s: float, stream: Literal["stdout", "stderr"] = "stderr"
) -> tuple[int, str]:
    """Run a short command; return its exit code and what it writes to one of its streams.

    Raises:
        TimeoutError: The command ran past `timeout_s` and was killed.
        OSError: The command cannot be started.
    """
    pipes = {"stdout": DEVNULL, "stderr": DEVNULL, stream: PIPE}
    child = start_child(command, stdout=pipes["stdout"], stderr=pipes["stderr"])
    try:
        texts = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end within {timeout_s:g} s") from None
    finally:
        kill_child(child)
    return child.returncode, b"".join(filter(None, texts)).decode("utf-8", "replace").strip()

"""The one way this project starts a child process of its own.

Linux delivers a child's parent-death signal when the *thread* that started it ends, not the
process. All children are therefore started by one thread that lives as long as this process:
they never die because some event loop's thread came to its end, and always die with us.

Does not isolate anything (`isolation`) and does not speak to the child (`supervisor`).
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Child = subprocess.Popen[bytes]
NOWHERE = subprocess.DEVNULL


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")


def start_child(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] = NOWHERE,
    stdout: int | IO[bytes] = NOWHERE,
    stderr: int | IO[bytes] = NOWHERE,
) -> Child:
    """Start `command` (an absolute path and its arguments) with an empty environment.

    Raises `OSError` when it cannot be started.
    """

    def start() -> Child:
        return subprocess.Popen(
            list(command), stdin=stdin, stdout=stdout, stderr=stderr, env={}, cwd="/"
        )

    return _starter().submit(start).result()


def end_child(child: Child, *, timeout_s: float = 5.0) -> None:
    """Kill the child and collect it. Safe to call twice; never waits beyond `timeout_s`."""
    if child.poll() is None:
        child.kill()
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return  # blocked in the kernel: it ends when the call it sits in returns


def run_to_end(command: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
    """Exit code and error text of a short command.

    Raises `TimeoutError` past the deadline (the command is killed) and `OSError` when it
    cannot be started.
    """
    child = start_child(command, stderr=subprocess.PIPE)
    try:
        _, error = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end within {timeout_s:g} s") from None
    finally:
        end_child(child)
    return child.returncode, error.decode("utf-8", "replace").strip()

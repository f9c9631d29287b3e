"""Calls of functions in forks of a worker, under limits of processor time and memory.

A library that parses what others wrote may compute without end, take all memory or crash on it. In
a fork this costs neither the worker, whose slow modules stay imported, nor more time than the
limit, in whatever code the fork is. Only for processes with a single thread, such as the workers of
a `WorkerPool`, whose guard also ends the forks of a worker that it kills.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class ForkError(RuntimeError):
    """The fork ended without a result: the function raised, crashed or had no memory."""


class ForkTimeError(ForkError):
    """The fork used up its processor time."""


def call_in_fork(function: Callable[[], bytes], *, cpu_s: float, num_bytes: int) -> bytes:
    """Return what a function returns in a fork of this process.

    Args:
        function: Its changes of this process's state are lost.
        cpu_s: Limit of its processor time.
        num_bytes: Limit of the fork's address space, this process's own included.

    Raises:
        ForkError: There is no result; what an exception says is in the process's standard error.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_fork(function, writer, cpu_s, num_bytes)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        raise ForkTimeError(f"it took more than {cpu_s:g} s of processor time")
    if code:
        raise ForkError(f"its process ended with exit code {code}")
    return result


def _run_fork(function: Callable[[], bytes], writer: int, cpu_s: float, num_bytes: int) -> NoReturn:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        result = function()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(result)
        code = 0
    except BaseException:  # noqa: BLE001  the edge of the process, which must not return
        traceback.print_exc()
    finally:
        os._exit(code)

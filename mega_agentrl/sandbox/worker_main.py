"""The program of one `WorkerPool` worker: a guard process and the worker that it forks.

The guard leads its own session and is the subreaper of all processes that the worker's functions
start. It waits until the worker ends, the pool closes the channel or the owner dies; then it kills
all its descendants and exits with the worker's exit code, or 128 + the number of the signal that
killed the worker. So when the guard has ended, no process is left.

The worker serves one call at a time on its main thread, so that functions may use signals::

    pool   -> worker  {"path": [...], "folder": ..., "environment": {...}}    once
    worker -> pool    {"event": "up"}                                         once
    pool   -> worker  {"function": "module:name", "arguments": JSON text of an object}
    worker -> pool    {"event": "started"}     the function is imported and starts to run
    worker -> pool    {"event": "done", "value": JSON text}
                      or {"event": "failed", "error": ..., "traceback": ...}

The output of a function goes to a file that is emptied before each call. This program isolates
nothing: it is for our own and the user's code only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.processes import kill_descendants

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_JSON_BYTES = 1 << 25
"""Limit of a call's arguments and of its result, each as JSON text."""

SINGLE_THREAD_ENV = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
"""Variables without which every worker would start one thread per core."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(owner_pid: int) -> NoReturn:
    """Guard a worker of the pool in process `owner_pid`; descriptor 0 is the channel, 2 the log."""
    os.setsid()  # Ctrl-C is for the owner
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    channel_socket = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    owner_fd = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        os._exit(1)  # the owner died before we could watch it
    worker = os.fork()
    if worker == 0:
        _run_worker(channel_socket)
    os._exit(_guard_worker(worker, channel_socket, owner_fd))


def _guard_worker(worker: int, channel_socket: socket.socket, owner_fd: int) -> int:
    worker_fd = os.pidfd_open(worker)
    poller = select.poll()
    poller.register(worker_fd, select.POLLIN)
    poller.register(owner_fd, select.POLLIN)
    poller.register(channel_socket, select.POLLRDHUP)
    poller.poll()
    with contextlib.suppress(TimeoutError):  # a process blocked in the kernel ends later
        kill_descendants(os.getpid(), spare=set())
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run_worker(channel_socket: socket.socket) -> NoReturn:
    guard = os.getppid()
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _serve_calls(Channel(channel_socket, max_bytes=4 * MAX_JSON_BYTES))
    except (EOFError, OSError):
        os._exit(0)  # the pool has closed the channel


def _serve_calls(channel: Channel) -> NoReturn:
    settings = channel.receive()
    os.environ.update(SINGLE_THREAD_ENV | settings["environment"])
    sys.path[:] = settings["path"]
    sys.argv[:] = ["worker"]
    os.chdir(settings["folder"])
    channel.send({"event": "up"})
    pid = os.getpid()
    while True:
        call = channel.receive()
        _truncate_log()
        answer = _run_call(call, channel)
        if os.getpid() != pid:
            os._exit(0)  # a child that a function forked returned to this loop
        with contextlib.suppress(OSError, ValueError):  # the function closed it
            sys.stdout.flush()
        channel.send(answer)


def _run_call(call: dict[str, Any], channel: Channel) -> dict[str, Any]:
    try:
        function = load_function(call["function"])
        arguments = json.loads(call["arguments"])
        channel.send({"event": "started"})
        text = to_json(function(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the edge of the process
        message = traceback.format_exception_only(error)[-1].strip()
        return {"event": "failed", "error": message, "traceback": traceback.format_exc()}
    return {"event": "done", "value": text}


@cache
def load_function(function: str) -> Callable[..., object]:
    """Import and return the callable "module:name".

    Raises:
        ValueError: There is no such callable.
        Exception: The import failed.
    """
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise InputError("function", function, "module:name")
    attribute = getattr(importlib.import_module(module), name, None)
    if not callable(attribute):
        cause = f"{module} has no callable {name}, but {attribute!r}"
        raise InputError("function", function, "module:name of a callable", cause)
    return attribute  # type: ignore[no-any-return]


def to_json(value: object, name: str = "value") -> str:
    """Return a value as JSON text; numpy and torch scalars and arrays become numbers and lists.

    Raises:
        InputError: A type has no JSON form (the error names it), or the text is too long.
    """
    try:
        text = json.dumps(value, default=_json_default)
    except (RecursionError, TypeError, ValueError) as error:
        expected = "numbers, text, lists and objects, none in itself and not nested too deeply"
        raise InputError(name, type(value).__name__, expected, str(error)) from error
    if len(text) > MAX_JSON_BYTES:
        expected = f"at most {MAX_JSON_BYTES} bytes of JSON"
        raise InputError(name, f"{len(text)} bytes", expected)
    return text


def _json_default(value: object) -> object:
    convert = getattr(value, "tolist", None)  # gives a number for a scalar
    if convert is None:
        raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
    return convert()


def _truncate_log() -> None:
    """Empty the log, which is opened for appending, so that it holds this call's output only."""
    with contextlib.suppress(OSError):  # an earlier call closed the log
        if os.fstat(2).st_size:
            os.ftruncate(2, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

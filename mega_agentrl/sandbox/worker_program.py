"""The program of one worker of `workers.WorkerPool`: a guard, and the worker it forks.

The guard leads a session of its own and adopts whatever the worker's functions start and
abandon. It waits for the worker to end, the pool to hang up or the owner to die, however; then
it ends every process below it and itself, with the worker's exit code (128 + the signal's
number for one that was killed). So the end of the channel means that nothing is left.

The worker answers one call at a time on its main thread, so that functions may use signals:

    pool   -> worker  {"path": [...], "folder": ..., "environment": {...}}    once
    worker -> pool    {"event": "up"}                                         once
    pool   -> worker  {"function": "module:name", "arguments": JSON text of an object}
    worker -> pool    {"event": "started"}           the function is imported, and runs now
    worker -> pool    {"event": "done", "value": JSON text}
                      or {"event": "failed", "error": ..., "traceback": ...}

What a function prints goes to a file that is emptied before each call, never to the channel.
Isolates nothing: for our own and the user's code only.
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

from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.processes import end_leftovers

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 1 << 25
"""Of one call's arguments, and of its result, as JSON text."""

SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Else every worker would start a thread for each core."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(owner: int) -> NoReturn:
    """Guard a worker. owner: process id of whoever started us.

    Descriptor 0 is the channel, 2 the log.
    """
    os.setsid()  # Ctrl-C is for the owner
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    end = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    owner_fd = os.pidfd_open(owner)
    if os.getppid() != owner:
        os._exit(1)  # it died before we could watch it
    worker = os.fork()
    if worker == 0:
        _work(end)
    os._exit(_guard(worker, end, owner_fd))


def _guard(worker: int, end: socket.socket, owner_fd: int) -> int:
    worker_fd = os.pidfd_open(worker)
    poller = select.poll()
    poller.register(worker_fd, select.POLLIN)
    poller.register(owner_fd, select.POLLIN)
    poller.register(end, select.POLLRDHUP)
    poller.poll()
    with contextlib.suppress(TimeoutError):  # one blocked in the kernel ends when it can
        end_leftovers(os.getpid(), spare=set())
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _work(end: socket.socket) -> NoReturn:
    guard = os.getppid()
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _serve(Channel(end, max_bytes=4 * MOST_BYTES))
    except (EOFError, OSError):
        os._exit(0)  # the pool has hung up


def _serve(channel: Channel) -> NoReturn:
    settings = channel.receive()
    os.environ.update(SINGLE_THREADED | settings["environment"])
    sys.path[:] = settings["path"]
    sys.argv[:] = ["worker"]
    os.chdir(settings["folder"])
    channel.send({"event": "up"})
    pid = os.getpid()
    while True:
        call = channel.receive()
        _empty_log()
        answer = _answer(call, channel)
        if os.getpid() != pid:
            os._exit(0)  # a function forked and its child came back here: not the worker
        with contextlib.suppress(OSError, ValueError):  # the function closed it
            sys.stdout.flush()
        channel.send(answer)


def _answer(call: dict[str, Any], channel: Channel) -> dict[str, Any]:
    try:
        function = load(call["function"])
        arguments = json.loads(call["arguments"])
        channel.send({"event": "started"})
        text = to_json(function(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the edge of the process
        said = traceback.format_exception_only(error)[-1].strip()
        return {"event": "failed", "error": said, "traceback": traceback.format_exc()}
    return {"event": "done", "value": text}


@cache
def load(function: str) -> Callable[..., object]:
    """The callable behind "module:name", imported once.

    Raises `ValueError` for what is none, and whatever the import raises.
    """
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise ValueError(f"function={function!r}: expected module:name")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(  # noqa: TRY004
            f"function={function}: {module} has no callable {name}, got {found!r}"
        )
    return found  # type: ignore[no-any-return]


def to_json(value: object) -> str:
    """JSON text; scalars and arrays of numpy and torch become numbers and lists.

    Raises `ValueError` naming the type that has no JSON form, or for a text too long.
    """
    try:
        text = json.dumps(value, default=_plain)
    except RecursionError as error:
        raise ValueError("a value nested too deeply, or that holds itself") from error
    except TypeError as error:
        raise ValueError(f"{error}; expected numbers, text, lists and objects") from error
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes of JSON, expected at most {MOST_BYTES}")
    return text


def _plain(value: object) -> object:
    convert = getattr(value, "tolist", None)  # gives a number for a scalar
    if convert is None:
        raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
    return convert()


def _empty_log() -> None:
    """It is opened for appending: what this call writes starts at its front."""
    with contextlib.suppress(OSError):  # an earlier call closed it
        if os.fstat(2).st_size:
            os.ftruncate(2, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

"""A pool of child processes for our own and the user's functions, with hard deadlines.

`submit` consumes a function's name and keyword arguments and produces a `Future`; it works from
any thread and does not wait. Each of `num_workers` threads has one worker (`worker_program`),
serves one call at a time and is unblocked by the answer, the deadline, the worker's death or
`close`. A worker that is past its deadline or dies is ended with all it started, and
replaced at once; its call fails, the others go on.

No call runs twice: one whose worker died is repeated, once, only where the worker had not yet
said that the function runs.

What a child gets of its owner: `sys.path` (where Python finds modules) and the working folder, as
they are when the worker starts, and the environment variables named in `environment`; no other
variable, but one thread for each numeric library. The variables are set after the interpreter's
start: those that the loader or the interpreter read (LD_LIBRARY_PATH, PYTHONHASHSEED) come too
late. Arguments and results travel as JSON: tuples arrive as lists, keys as text. What a function
prints is dropped, but for the end of it in the error of a call that died or hung.

Isolates nothing: what the policy wrote belongs into a `SandboxPool`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.process import end_child, start_child
from mega_agentrl.sandbox.worker_program import MOST_BYTES, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mega_agentrl.sandbox.worker_program import main; main(int(sys.argv[2]))"
)
_END_S = 5.0
_SAID_BYTES = 2000
_ATTEMPTS = 2
_logger = logging.getLogger(__name__)


class WorkerCallError(RuntimeError):
    """A call has no result; says which function and why."""


class FunctionFailedError(WorkerCallError):
    """The function could not be imported, raised, or gave what has no JSON form.

    traceback: the worker's, as text.
    """

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


class DeadlineError(WorkerCallError):
    """The function ran past its deadline; its worker was killed."""


class WorkerLostError(WorkerCallError):
    """The worker died.

    started: the function may have run.
    """

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


class PoolClosedError(WorkerCallError):
    """The pool was closed before the call was done."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Call:
    """A function, as "module:name", and its keyword arguments as JSON text."""

    function: str
    arguments: str
    future: Future[Any] = field(default_factory=Future)


def new_call(function: str, arguments: Mapping[str, object]) -> Call:
    """Raises `ValueError` for arguments that have no JSON form or are too long."""
    try:
        return Call(function=function, arguments=to_json(dict(arguments)))
    except ValueError as error:
        raise ValueError(f"arguments of {function}: {error}") from error


class WorkerPool:
    """`num_workers` processes; `start` before the first `submit`, `close` at the end."""

    def __init__(
        self,
        num_workers: int,
        deadline_s: float,
        *,
        warm_up: Sequence[Call] = (),
        environment: Mapping[str, str] | None = None,
        start_deadline_s: float = 120.0,
    ) -> None:
        """deadline_s: of one call, from when its function runs. warm_up: calls that each worker
        makes as it starts, to import what is slow and to check what can be checked.
        start_deadline_s: for a worker to start, and for each warm-up call and each import."""
        if num_workers < 1 or deadline_s <= 0:
            raise ValueError(
                f"num_workers={num_workers}, deadline_s={deadline_s:g}: expected at least 1 and "
                "more than 0"
            )
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._warm_up = tuple(warm_up)
        self._environment = dict(environment or {})
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._closed = False
        self._num_replaced = 0

    @property
    def num_replaced(self) -> int:
        """Workers lost so far."""
        return self._num_replaced

    def start(self) -> None:
        """Start and warm every worker; raises `ValueError` where one does not come up."""
        with self._lock:
            if self._threads or self._closed:
                raise RuntimeError("start of a worker pool: expected once, before close")
            ups: list[Future[None]] = [Future() for _ in range(self._num_workers)]
            self._threads = [
                threading.Thread(target=self._serve, args=(up,), name="workers", daemon=True)
                for up in ups
            ]
            for thread in self._threads:
                thread.start()
        try:
            for up in ups:
                up.result()
        except WorkerCallError as error:
            self.close()
            raise ValueError(f"worker pool: a worker did not come up: {error}") from error

    def submit(self, function: str, arguments: Mapping[str, object]) -> Future[Any]:
        """Call `function` ("module:name") with keyword `arguments` in some worker.

        The future gives the result read back from JSON, or raises a `WorkerCallError`; it can be
        cancelled until the call begins. Raises `ValueError` for arguments without a JSON form,
        `PoolClosedError` for a pool that is closed, `RuntimeError` for one not started.
        """
        call = new_call(function, arguments)
        with self._lock:
            if self._closed:
                raise PoolClosedError(f"{function}: the worker pool is closed")
            if not self._threads:
                raise RuntimeError(f"{function}: the worker pool is not started; call start()")
            self._calls.put(call)
        return call.future

    def close(self) -> None:
        """End every worker and what it started; calls without a result fail. Safe twice."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.hang_up()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, up: Future[None]) -> None:
        """The life of one thread and its workers."""
        worker: _Worker | None = None
        try:
            worker = self._new_worker()
        except WorkerCallError as error:
            up.set_exception(error)
        else:
            up.set_result(None)
        while (call := self._calls.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                worker = self._run(call, worker)
            if worker is None and not self._closed:
                worker = self._replacement()
        if worker is not None:
            self._end(worker)

    def _run(self, call: Call, worker: _Worker | None) -> _Worker | None:
        """Settle the call's future; the worker, None where it was lost."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                worker = worker or self._new_worker()
                value = worker.run(call, self._start_deadline_s, self._deadline_s)
            except FunctionFailedError as error:
                call.future.set_exception(error)
                return worker
            except WorkerCallError as error:
                if worker is not None:
                    self._end(worker)
                    with self._lock:
                        self._num_replaced += 1
                worker = None
                if self._closed:
                    why = f"{call.function}: the worker pool was closed"
                    call.future.set_exception(PoolClosedError(why))
                    return None
                lost = isinstance(error, WorkerLostError) and not error.started
                if not lost or attempt == _ATTEMPTS:
                    call.future.set_exception(error)
                    return None
            else:
                call.future.set_result(value)
                return worker
        raise AssertionError("every attempt settles the call or is followed by another")

    def _replacement(self) -> _Worker | None:
        try:
            return self._new_worker()
        except WorkerCallError as error:
            if not self._closed:
                _logger.warning("worker pool: %s; tried again at the next call", error)
            return None

    def _new_worker(self) -> _Worker:
        """A warm worker; raises `WorkerCallError`."""
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
            if self._closed:
                worker.hang_up()
        try:
            worker.wait_until_up(self._environment, self._start_deadline_s)
            for call in self._warm_up:
                worker.run(call, self._start_deadline_s, self._start_deadline_s)
        except WorkerCallError:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()


class _Worker:
    """One child process and its channel; used by one thread, but `hang_up`."""

    def __init__(self) -> None:
        """Start it; raises `WorkerLostError`."""
        self._path = [os.path.abspath(str(entry)) for entry in sys.path]
        command = [sys.executable, "-I", "-X", "utf8", "-c", _START]
        self._log = tempfile.TemporaryFile()
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # the worker empties it
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = start_child(
                    [*command, json.dumps(self._path), str(os.getpid())],
                    stdin=theirs.fileno(),
                    stderr=self._log,
                )
        except (OSError, RuntimeError) as error:  # RuntimeError: the interpreter is ending
            ours.close()
            self._log.close()
            raise WorkerLostError(f"worker did not start: {error}", started=False) from error
        self._channel = Channel(ours, max_bytes=4 * MOST_BYTES)

    def wait_until_up(self, environment: Mapping[str, str], deadline_s: float) -> None:
        """Hand over path, folder and environment; raises `WorkerLostError`."""
        settings = {"path": self._path, "folder": os.getcwd(), "environment": dict(environment)}
        self._send(settings, "its start", deadline_s)
        self._receive("its start", deadline_s, started=False)

    def run(self, call: Call, start_deadline_s: float, deadline_s: float) -> Any:
        """The function's result; after any error but `FunctionFailedError` the worker is of no
        use any more."""
        order = {"function": call.function, "arguments": call.arguments}
        self._send(order, call.function, start_deadline_s)
        answer = self._receive(call.function, start_deadline_s, started=False)
        if answer["event"] == "started":
            answer = self._receive(call.function, deadline_s, started=True)
        if answer["event"] == "failed":
            raise FunctionFailedError(f"{call.function}: {answer['error']}", answer["traceback"])
        return json.loads(answer["value"])

    def hang_up(self) -> None:
        """Unblock whoever waits and let the guard end the worker. From any thread."""
        with contextlib.suppress(OSError):
            self._channel.shutdown()

    def close(self) -> None:
        """End it and all it started. Safe twice."""
        self.hang_up()
        self._wait()
        end_child(self._child)
        self._channel.close()
        self._log.close()

    def _send(self, message: dict[str, Any], what: str, timeout_s: float) -> None:
        try:
            self._channel.send(message, timeout_s=timeout_s)
        except OSError as error:
            raise self._lost(what, started=False) from error

    def _receive(self, what: str, timeout_s: float, *, started: bool) -> dict[str, Any]:
        try:
            return self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            doing = "did not return" if started else "was not imported"
            why = f"{what}: {doing} within {timeout_s:g} s; its worker is killed"
            raise DeadlineError(why + self._said()) from error
        except (EOFError, OSError, ValueError) as error:
            raise self._lost(what, started=started) from error

    def _lost(self, what: str, *, started: bool) -> WorkerLostError:
        """The error, with how the worker ended and what was printed last."""
        self.hang_up()
        self._wait()
        text = f"{what}: the worker died ({_ending(self._child.poll())})"
        return WorkerLostError(text + self._said(), started=started)

    def _said(self) -> str:
        """What the call printed last."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _SAID_BYTES))
        said = self._log.read(_SAID_BYTES).decode("utf-8", "replace").strip()
        return f"; it wrote: {said}" if said else ""

    def _wait(self) -> None:
        """Let the guard do its work."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)


def _ending(code: int | None) -> str:
    if code is None:
        return "it does not end"
    if code == 128 + 9:
        return "killed by signal 9; probable cause: out of memory"
    return f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"

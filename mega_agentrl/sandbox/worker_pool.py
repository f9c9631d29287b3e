"""A pool of child processes for our own and the user's functions, with hard deadlines.

`WorkerPool.submit` takes a function's name and keyword arguments and returns a `Future`; it does
not wait and works from any thread. Each of `num_workers` threads has one worker (`worker_main`) and
serves one call at a time, which ends with the result, the deadline, the worker's death or `close`.
A worker that misses its deadline or dies is killed with every process it started and replaced at
once. No call runs twice: a call whose worker died is repeated once, and only if the worker had not
yet reported that the function runs.

A worker gets the owner's `sys.path` and working folder, as they are when it starts, and the
variables in `environment`; its only other variables limit numeric libraries to one thread. They are
set after the interpreter's start, too late for variables that the loader or the interpreter itself
reads (LD_LIBRARY_PATH, PYTHONHASHSEED). Arguments and results are JSON: tuples arrive as lists,
keys as text. The output of a function is dropped, except that the error of a call that died or
timed out shows the end of it.

The pool isolates nothing: code written by the policy belongs in a `SandboxPool`. Pebble's
`ProcessPool` is not used, because at a deadline it kills the worker but not the processes that the
worker started, and it unpickles the results of the user's functions in this process.
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

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.process import kill_child, read_log_tail, start_child
from mega_agentrl.sandbox.worker_main import MAX_JSON_BYTES, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mega_agentrl.sandbox.worker_main import main; main(int(sys.argv[2]))"
)
_EXIT_WAIT_S = 60.0
"""Time for the guard to end the worker's processes; longer than it gives them to stop."""
_LOG_TAIL_BYTES = 2000
_MAX_ATTEMPTS = 2
_logger = logging.getLogger(__name__)


class WorkerCallError(RuntimeError):
    """A call failed.

    Attributes:
        function: Name of the function.
        reason: Why the call failed.
    """

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"{function}: {reason}")
        self.function = function
        self.reason = reason


class FunctionFailedError(WorkerCallError):
    """The function could not be imported, raised, or returned a value without a JSON form.

    Attributes:
        traceback: The worker's traceback as text.
    """

    def __init__(self, function: str, reason: str, traceback: str) -> None:
        super().__init__(function, reason)
        self.traceback = traceback


class WorkerTimeoutError(WorkerCallError):
    """The function, or its import, ran past its deadline; its worker was killed.

    Attributes:
        timeout_s: The limit.
        output: End of what the worker had written.
    """

    def __init__(self, function: str, reason: str, timeout_s: float, output: str) -> None:
        text = f"{reason} within {timeout_s:g} s; its worker is killed"
        super().__init__(function, text + _output_note(output))
        self.timeout_s = timeout_s
        self.output = output


class WorkerLostError(WorkerCallError):
    """The worker died.

    Attributes:
        may_have_run: Whether the function may have run.
        exit_code: The worker's, 128 more than the signal that killed it; None if unknown.
        output: End of what the worker had written.
    """

    def __init__(
        self,
        function: str,
        reason: str,
        *,
        may_have_run: bool,
        exit_code: int | None = None,
        output: str = "",
    ) -> None:
        super().__init__(function, reason + _output_note(output))
        self.may_have_run = may_have_run
        self.exit_code = exit_code
        self.output = output


class PoolClosedError(WorkerCallError):
    """The pool was closed before the call was done."""


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerCall:
    """A function and its arguments, ready to be sent."""

    function: str
    """"module:name"."""
    arguments: str
    """Keyword arguments as JSON text."""
    future: Future[Any] = field(default_factory=Future)
    """Receives the result."""


def make_worker_call(function: str, arguments: Mapping[str, object]) -> WorkerCall:
    """Return the call; raises `InputError` for arguments without a JSON form or too long."""
    text = to_json(dict(arguments), f"arguments of {function}")
    return WorkerCall(function=function, arguments=text)


class WorkerPool:
    """A pool of worker processes; call `start` before the first `submit` and `close` at the end.

    Args:
        num_workers: Number of processes.
        timeout_s: Limit of one call, from the start of its function.
        warm_up: Calls that each worker makes as it starts, to import slow modules and check early.
        environment: Environment variables of the workers.
        start_timeout_s: Limit for a worker's start, and for each warm-up call and each import.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        warm_up: Sequence[WorkerCall] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        if num_workers < 1:
            raise InputError("num_workers", num_workers, "at least 1")
        if timeout_s <= 0:
            raise InputError("timeout_s", timeout_s, "above 0")
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._warm_up_calls = tuple(warm_up)
        self._environment = dict(environment or {})
        self._calls: queue.SimpleQueue[WorkerCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._workers: set[_WorkerProcess] = set()
        self._closed = False
        self._num_replaced = 0

    @property
    def num_replaced(self) -> int:
        """Number of workers lost so far."""
        return self._num_replaced

    def start(self) -> None:
        """Start and warm every worker; raises `ValueError` if one does not start."""
        with self._lock:
            if self._threads or self._closed:
                raise RuntimeError("start of a worker pool: expected once, before close")
            ready_futures: list[Future[None]] = [Future() for _ in range(self._num_workers)]
            self._threads = [
                threading.Thread(
                    target=self._serve_calls, args=(ready,), name="workers", daemon=True
                )
                for ready in ready_futures
            ]
            for thread in self._threads:
                thread.start()
        try:
            for ready in ready_futures:
                ready.result()
        except WorkerCallError as error:
            self.close()
            raise ValueError(f"worker pool: a worker did not come up: {error}") from error

    def submit(self, function: str, arguments: Mapping[str, object]) -> Future[Any]:
        """Call `function` ("module:name") with keyword `arguments` in some worker.

        Returns:
            A future of the result, read back from JSON, or of a `WorkerCallError`. It can be
            cancelled until the call begins.

        Raises:
            ValueError: The arguments have no JSON form.
            PoolClosedError: The pool is closed.
            RuntimeError: The pool is not started.
        """
        call = make_worker_call(function, arguments)
        with self._lock:
            if self._closed:
                raise PoolClosedError(function, "the worker pool is closed")
            if not self._threads:
                raise RuntimeError(f"{function}: the worker pool is not started; call start()")
            self._calls.put(call)
        return call.future

    def close(self) -> None:
        """End every worker with its child processes; unfinished calls fail. Safe to call twice."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.shutdown()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve_calls(self, ready: Future[None]) -> None:
        """Run one thread of the pool: start its worker, serve calls, replace lost workers."""
        worker: _WorkerProcess | None = None
        try:
            worker = self._start_worker()
        except WorkerCallError as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)
        while (call := self._calls.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                worker = self._run_call(call, worker)
            if worker is None and not self._closed:
                worker = self._try_replace_worker()
        if worker is not None:
            self._close_worker(worker)

    def _run_call(self, call: WorkerCall, worker: _WorkerProcess | None) -> _WorkerProcess | None:
        """Set the result of the call's future; return the worker, or None if it was lost."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                worker = worker or self._start_worker()
                value = worker.run(call, self._start_timeout_s, self._timeout_s)
            except FunctionFailedError as error:
                call.future.set_exception(error)
                return worker
            except WorkerCallError as error:
                if worker is not None:
                    self._close_worker(worker)
                    with self._lock:
                        self._num_replaced += 1
                worker = None
                if self._closed:
                    closed = PoolClosedError(call.function, "the worker pool was closed")
                    call.future.set_exception(closed)
                    return None
                is_repeatable = isinstance(error, WorkerLostError) and not error.may_have_run
                if not is_repeatable or attempt == _MAX_ATTEMPTS:
                    call.future.set_exception(error)
                    return None
            else:
                call.future.set_result(value)
                return worker
        raise AssertionError("the last attempt sets the result")

    def _try_replace_worker(self) -> _WorkerProcess | None:
        try:
            return self._start_worker()
        except WorkerCallError as error:
            if not self._closed:
                _logger.warning("worker pool: %s; tried again at the next call", error)
            return None

    def _start_worker(self) -> _WorkerProcess:
        """Return a warm worker; raises `WorkerCallError`."""
        worker = _WorkerProcess()
        with self._lock:
            self._workers.add(worker)
            if self._closed:
                worker.shutdown()
        try:
            worker.wait_until_ready(self._environment, self._start_timeout_s)
            for call in self._warm_up_calls:
                worker.run(call, self._start_timeout_s, self._start_timeout_s)
        except WorkerCallError:
            self._close_worker(worker)
            raise
        return worker

    def _close_worker(self, worker: _WorkerProcess) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()


class _WorkerProcess:
    """One child process and its channel, used by one thread, except for `shutdown`.

    The constructor starts it and raises `WorkerLostError` if that fails.
    """

    def __init__(self) -> None:
        self._path = [os.path.abspath(str(entry)) for entry in sys.path]
        command = [sys.executable, "-I", "-X", "utf8", "-c", _BOOTSTRAP]
        self._log = tempfile.TemporaryFile()
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # the worker truncates it
        pool_end, worker_end = socket.socketpair()
        try:
            with worker_end:
                self._child = start_child(
                    [*command, json.dumps(self._path), str(os.getpid())],
                    stdin=worker_end.fileno(),
                    stderr=self._log,
                )
        except (OSError, RuntimeError) as error:  # RuntimeError: our interpreter is shutting down
            pool_end.close()
            self._log.close()
            raise WorkerLostError("worker start", str(error), may_have_run=False) from error
        self._channel = Channel(pool_end, max_bytes=4 * MAX_JSON_BYTES)

    def wait_until_ready(self, environment: Mapping[str, str], timeout_s: float) -> None:
        """Send path, folder and environment; raises `WorkerCallError` if there is no answer."""
        settings = {"path": self._path, "folder": os.getcwd(), "environment": dict(environment)}
        self._send(settings, "worker start", timeout_s)
        self._receive("worker start", timeout_s, may_have_run=False)

    def run(self, call: WorkerCall, start_timeout_s: float, timeout_s: float) -> Any:
        """Return the function's result; only `FunctionFailedError` leaves the worker usable."""
        order = {"function": call.function, "arguments": call.arguments}
        self._send(order, call.function, start_timeout_s)
        answer = self._receive(call.function, start_timeout_s, may_have_run=False)
        if answer["event"] == "started":
            answer = self._receive(call.function, timeout_s, may_have_run=True)
        if answer["event"] == "failed":
            raise FunctionFailedError(call.function, answer["error"], answer["traceback"])
        return json.loads(answer["value"])

    def shutdown(self) -> None:
        """End all waits, and let the guard end the worker. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._channel.shutdown()

    def close(self) -> None:
        """End the worker with its child processes. Safe to call twice."""
        self.shutdown()
        self._wait_for_exit()
        kill_child(self._child)
        self._channel.close()
        self._log.close()

    def _send(self, message: dict[str, Any], what: str, timeout_s: float) -> None:
        try:
            self._channel.send(message, timeout_s=timeout_s)
        except OSError as error:
            raise self._lost_error(what, may_have_run=False) from error

    def _receive(self, what: str, timeout_s: float, *, may_have_run: bool) -> dict[str, Any]:
        try:
            return self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            failure = "did not return" if may_have_run else "was not imported"
            raise WorkerTimeoutError(what, failure, timeout_s, self._log_tail()) from error
        except CONNECTION_ERRORS as error:
            raise self._lost_error(what, may_have_run=may_have_run) from error

    def _lost_error(self, what: str, *, may_have_run: bool) -> WorkerLostError:
        """Return the error, with the worker's exit status and the end of its output."""
        self.shutdown()
        self._wait_for_exit()
        exit_code = self._child.poll()
        return WorkerLostError(
            what,
            f"the worker died ({_describe_exit(exit_code)})",
            may_have_run=may_have_run,
            exit_code=exit_code,
            output=self._log_tail(),
        )

    def _log_tail(self) -> str:
        return read_log_tail(self._log, _LOG_TAIL_BYTES)

    def _wait_for_exit(self) -> None:
        """Give the guard time to end the worker."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_EXIT_WAIT_S)


def _output_note(output: str) -> str:
    return f"; it wrote: {output}" if output else ""


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it has not ended"
    if code == 128 + 9:
        return "killed by signal 9; probable cause: out of memory"
    return f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"

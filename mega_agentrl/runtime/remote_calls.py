"""Named remote calls with timeouts.

`gather` waits for a set of named calls and raises at the first failure, because the peers of a dead
rank would otherwise block in a collective until its own timeout.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from mega_agentrl.types.errors import AuxiliaryModelLostError, EngineLostError, RankLostError

POLL_INTERVAL_S = 1.0
"""Interval in seconds at which a waiting `gather` calls `watch`."""

DEATH_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
)
"""Errors of Ray for a call whose process is dead.

The last three are not `RayActorError`s: Ray's memory monitor kills an actor with the second.
"""

RAY_MEMORY_KILLS: queue.SimpleQueue[str] = queue.SimpleQueue()
"""Names of the processes that Ray's memory monitor killed, for `driver_monitor` to report."""
DEATHS: queue.SimpleQueue[str] = queue.SimpleQueue()
"""Names of the processes that were found dead, for `memory_watch` to tell which one was first."""


class RemoteCallError(RuntimeError):
    """A remote call failed, its process died or it timed out."""

    def __init__(self, message: str, operation: str = "", processes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.operation = operation
        """Name of the operation; empty if it has none."""
        self.processes = tuple(processes)
        """Names of the processes that failed or are silent."""


class ProcessDiedError(RemoteCallError):
    """The process that should run a call is dead or hangs for good."""

    def __init__(self, message: str, name: str, operation: str = "") -> None:
        super().__init__(message, operation, (name,))
        self.process_name = name


class NoEngineLeftError(RemoteCallError):
    """No engine will ever accept requests, because all are abandoned or the run ends."""

    def __init__(self, reasons: Mapping[int, str], end_reason: str) -> None:
        super().__init__(f"no engine is left: {'; '.join(reasons.values()) or end_reason}")
        self.reasons = dict(reasons)
        """Why each abandoned engine was abandoned, by index."""


class ModelRankDiedError(ProcessDiedError, AuxiliaryModelLostError):
    """A rank of a model other than the policy is dead or silent."""


class PolicyRankDiedError(RemoteCallError, RankLostError):
    """A call on the policy's ranks failed because one of them is dead or silent."""


def gather(
    calls: Mapping[str, Any],
    operation: str,
    timeout_s: float,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Wait for all calls and return their results by name, in the given order.

    Args:
        calls: Ray object refs by the name of the process that runs them (``policy rank 1``).
        operation: Name of the operation in error messages.
        timeout_s: Timeout for all calls together.
        watch: Called every `POLL_INTERVAL_S`; may raise to end the wait.

    Raises:
        RemoteCallError: A call failed or timed out; names the operation and the processes.
    """
    ends_at = time.monotonic() + timeout_s
    names = {ref: name for name, ref in calls.items()}
    results: dict[str, Any] = {}
    pending = list(names)
    while pending:
        remaining_s = max(0.0, ends_at - time.monotonic())
        timeout = min(remaining_s, POLL_INTERVAL_S)
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not ready and remaining_s > POLL_INTERVAL_S:
            if watch is not None:
                watch()
            continue
        if not ready:
            silent = sorted(names[ref] for ref in pending)
            raise RemoteCallError(
                f"{operation}: no answer within {timeout_s:g} s from {', '.join(silent)}",
                operation,
                silent,
            )
        for ref in ready:
            results[names[ref]] = _get_result(ref, operation, names[ref])
    return {name: results[name] for name in calls}


def gather_with_causes(
    calls: Mapping[str, Any],
    operation: str,
    timeout_s: float,
    grace_s: float,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Like `gather`, but the error lists the messages of all calls that failed.

    A process that fails because of another process often answers before the one that knows the
    cause. All processes therefore get `grace_s` seconds to answer after the first failure.
    """
    try:
        return gather(calls, operation, timeout_s, watch)
    except RemoteCallError as first:
        names = {ref: name for name, ref in calls.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=grace_s)
        errors = []
        for ref in sorted(ready, key=list(names).index):
            try:
                _get_result(ref, operation, names[ref])
            except RemoteCallError as error:
                errors.append(error)
        errors.append(first)
        failed = dict.fromkeys(name for error in errors for name in error.processes)
        message = "\n".join(dict.fromkeys(map(str, errors)))
        raise RemoteCallError(message, operation, list(failed)) from first


def _get_result(ref: Any, operation: str, name: str) -> Any:
    with translate_call_errors(operation, name):
        return ray.get(ref)


@contextmanager
def translate_call_errors(operation: str, name: str) -> Iterator[None]:
    """Turn the errors of a remote call into `RemoteCallError`s that name operation and process."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EngineLostError):
            message = f"{operation}: {name}: {error.cause}"
            raise ProcessDiedError(message, name, operation) from error
        message = f"{operation} failed on {name}: {error.cause!r}"
        raise RemoteCallError(message, operation, (name,)) from error
    except DEATH_ERRORS as error:
        raise ProcessDiedError(
            f"{operation}: {describe_death(name, error)}", name, operation
        ) from (error)
    except ray.exceptions.RayError as error:  # such as a lost object in its arguments
        message = f"{operation} failed on {name}: {_first_line(error)}"
        raise RemoteCallError(message, operation, (name,)) from error


def describe_death(name: str, error: BaseException) -> str:
    """Return how a process died according to one of `DEATH_ERRORS`.

    Its name is added to `DEATHS` and, if Ray's memory monitor killed it, to `RAY_MEMORY_KILLS`.
    """
    DEATHS.put(name)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        RAY_MEMORY_KILLS.put(name)
        return f"{name} was killed by Ray's memory monitor: {_first_line(error)}"
    return f"{name} died; its log file under logs/ in the run folder says why"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, whose text may be a page."""
    return next(iter(str(error).splitlines()), repr(error))


def redirect_output(log_file: Path) -> None:
    """Send stdout and stderr of this process and its children to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)

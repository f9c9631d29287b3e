"""Remote calls with a name and a deadline.

`gather` waits for a set of named calls and raises at the first one that fails, because the
peers of a dead rank would otherwise block in a collective until its own timeout.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from mega_agentrl.types.faults import EngineLostError, ModelLostError, RankLostError

LOOK_S = 1.0
"""How often a wait looks whether those it waits for are still alive."""


class RemoteError(RuntimeError):
    """A remote call failed, died or passed its deadline; says which and where."""


class DiedError(RemoteError):
    """The process that was to run a call is gone, or hangs for good. name: who."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class ModelGoneError(DiedError, ModelLostError):
    """The same of a rank of a model that is not the policy."""


class RankGoneError(RemoteError, RankLostError):
    """A call on the policy's ranks failed because one of them is dead or silent."""


def gather(
    calls: Mapping[str, Any],
    operation: str,
    deadline_s: float,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Results of all calls by name, in the order given.

    calls: object refs by the name of who runs them (``policy rank 1``). watch: called every
    `LOOK_S`, raises where waiting on is of no use.
    Waits for: all of them. Unblocked by: the first failure, `watch`, or the deadline.
    Raises `RemoteError` naming the operation and who failed or is still silent.
    """
    ends_at = time.monotonic() + deadline_s
    names = {ref: name for name, ref in calls.items()}
    results: dict[str, Any] = {}
    pending = list(names)
    while pending:
        left_s = max(0.0, ends_at - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, LOOK_S))
        if not ready and left_s > LOOK_S:
            if watch is not None:
                watch()
            continue
        if not ready:
            silent = ", ".join(sorted(names[ref] for ref in pending))
            raise RemoteError(f"{operation}: no answer within {deadline_s:g} s from {silent}")
        for ref in ready:
            results[names[ref]] = _result(ref, operation, names[ref])
    return {name: results[name] for name in calls}


def gather_causes(
    calls: Mapping[str, Any],
    operation: str,
    deadline_s: float,
    grace_s: float,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """As `gather`, for calls that fail together: the error has what each of them says.

    Waits grace_s for the others after the first failure: who is hit by the failure of another
    often answers before the one that knows the cause.
    """
    try:
        return gather(calls, operation, deadline_s, watch)
    except RemoteError as first:
        names = {ref: name for name, ref in calls.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=grace_s)
        reasons = []
        for ref in sorted(ready, key=list(names).index):
            try:
                _result(ref, operation, names[ref])
            except RemoteError as error:
                reasons.append(str(error))
        raise RemoteError("\n".join(dict.fromkeys([*reasons, str(first)]))) from first


def _result(ref: Any, operation: str, name: str) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EngineLostError):
            raise DiedError(f"{operation}: {name}: {error.cause}", name) from error
        raise RemoteError(f"{operation} failed on {name}: {error.cause!r}") from error
    except ray.exceptions.RayActorError as error:
        raise DiedError(
            f"{operation}: {name} died; its log file under logs/ in the run folder says why", name
        ) from error


def redirect_output(log_file: Path) -> None:
    """Send this process's stdout and stderr, its children's too, to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def free_port() -> int:
    """A TCP port that was free a moment ago on this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

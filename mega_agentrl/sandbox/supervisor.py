"""The outer end of one sandbox and of the sessions in it: starts the inner program and speaks
its protocol (`inner.host`).

Blocking, each object used by one thread at a time; but `Sandbox.kill` and `Ticket.cancel`,
which any thread may call. A waiting call then ends at once, by `SandboxLostError` or as cancelled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.cgroup import new_cgroup
from mega_agentrl.sandbox.host_user import take_user
from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.isolation import open_command, staged, walled_command
from mega_agentrl.sandbox.process import end_child, start_child
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.sandbox.cgroup import Cgroup
    from mega_agentrl.sandbox.inner.settings import Settings

_GRACE_S = 5.0
"""Beyond a call's own deadline, for its fork, its kill and the way back."""

_FORK_S = 20.0
_OWN_PROCESSES = 32
_LOST_WITH = (OSError, EOFError, ValueError)


class SandboxLostError(RuntimeError):
    """The sandbox died, broke the protocol or is past its deadline; it must be replaced.

    started: the code may have run, so the call must not be repeated.
    """

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


class RefusedError(RuntimeError):
    """The sandbox is well but could not do what was asked; no code ran."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SandboxResult:
    """How one call went. `output`: stdout where the code succeeded, else its error text.

    latency_s: from sending the code to the answer; waiting for a free sandbox not included.
    state_lost: a session's earlier state was not there any more when this call began.
    """

    status: ToolStatus
    output: str
    latency_s: float
    state_lost: bool = False


class Ticket:
    """Lets any thread cancel one call: before, while or after it runs."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._number = 0

    def cancel(self) -> None:
        """End the call at once; one that has not begun never does."""
        with self._lock:
            self.cancelled = True
            if self._line is not None:
                self._line.send_cancel(self._number)

    def begin(self, line: Line, number: int) -> bool:
        """The call is about to be sent; False where it must not be."""
        with self._lock:
            self._line, self._number = line, number
            return not self.cancelled


class Line:
    """One channel to a sandbox: one call at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._using = threading.Lock()  # a cancelled call's thread may still wait for its end
        self._number = 0

    def call(self, code: str, timeout_s: float, ticket: Ticket) -> SandboxResult:
        """Run `code`; raises `SandboxLostError`, or `RefusedError` where it did not run."""
        with self._using:
            return self._call(code, timeout_s, ticket)

    def fork(self) -> Line:
        """A session's fork; raises `RefusedError` or `SandboxLostError`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._using:
                self.send({"order": "fork"}, (theirs.fileno(),))
                self.receive(_FORK_S, expected="forked", started=True)
        except (RefusedError, SandboxLostError):
            ours.close()
            raise
        return Line(Channel(ours))

    def _call(self, code: str, timeout_s: float, ticket: Ticket) -> SandboxResult:
        begin = time.monotonic()
        self._number += 1
        if not ticket.begin(self, self._number):
            raise RefusedError("the call was cancelled")
        self.send({"order": "run", "id": self._number, "code": code, "timeout_s": timeout_s})
        if ticket.cancelled:  # perhaps before the order itself was sent
            self.send_cancel(self._number)
        self.receive(_GRACE_S, expected="started", started=False)
        answer = self.receive(timeout_s + _GRACE_S, expected="done", started=True)
        status, output = _read_answer(answer, timeout_s)
        latency_s = time.monotonic() - begin
        return SandboxResult(
            status=status, output=output, latency_s=latency_s, state_lost=answer["fresh"]
        )

    def send_cancel(self, number: int) -> None:
        """End the call of that number, if it is running."""
        with contextlib.suppress(OSError), self._sending:
            self._channel.send({"order": "cancel", "id": number}, timeout_s=1.0)

    def send(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send an order; raises `SandboxLostError`."""
        try:
            with self._sending:
                self._channel.send(order, fds, timeout_s=_GRACE_S)
        except OSError as error:
            raise SandboxLostError(f"cannot send an order: {error}", started=False) from error

    def receive(self, timeout_s: float, *, expected: str, started: bool) -> dict[str, Any]:
        """The answer; raises `SandboxLostError`, or `RefusedError` for a `failed` one."""
        try:
            message = self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            why = f"no answer within {timeout_s:g} s"
            raise SandboxLostError(why, started=started) from error
        except _LOST_WITH as error:
            raise SandboxLostError(str(error), started=started) from error
        if message.get("event") == "failed":
            raise RefusedError(str(message["error"]))
        if message.get("event") != expected:
            why = f"got {message.get('event')}, expected {expected}"
            raise SandboxLostError(why, started=started)
        return message

    def take_fd(self) -> int:
        """The descriptor that came with the last answer; raises `SandboxLostError`."""
        try:
            return self._channel.take_fds(1)[0]
        except ValueError as error:
            raise SandboxLostError(str(error), started=False) from error

    def hang_up(self) -> None:
        """Unblock whoever waits at either end."""
        with contextlib.suppress(OSError):  # the peer or an earlier call has closed it
            self._channel.shutdown()

    def close(self) -> None:
        """Close the channel; only while no thread waits on it."""
        self._channel.close()


class Sandbox:
    """One warm interpreter behind its wall."""

    def __init__(
        self,
        settings: Settings,
        *,
        total_memory_mib: int = 2048,
        start_deadline_s: float = 120.0,
    ) -> None:
        """Start it and wait until it is warm; raises `SandboxLostError`, and `ValueError`
        where there is no user left for it."""
        self._settings = settings
        self._total_memory_mib = total_memory_mib
        self.num_sessions = 0
        self._user = take_user() if settings.walled else None
        self._cgroup = self._new_cgroup() if not settings.stateful else None
        self._log = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        self.line = Line(Channel(ours))
        try:
            with theirs:
                self._child = start_child(self._command(), stdin=theirs.fileno(), stderr=self._log)
        except OSError as error:
            self._free()
            raise SandboxLostError(f"sandbox did not start: {error}", started=False) from error
        try:
            self.line.receive(start_deadline_s, expected="up", started=False)
        except SandboxLostError as error:
            raise self.lost(error) from error

    @property
    def pid(self) -> int:
        """Host process id of its outermost process."""
        return self._child.pid

    def call(self, code: str, timeout_s: float, ticket: Ticket | None = None) -> SandboxResult:
        """Run `code` in a fresh interpreter; raises `SandboxLostError` after which the sandbox
        is dead."""
        try:
            return self.line.call(code, timeout_s, ticket or Ticket())
        except RefusedError as error:
            if ticket is not None and ticket.cancelled:
                raise
            raise self.lost(SandboxLostError(str(error), started=False)) from error
        except SandboxLostError as error:
            raise self.lost(error) from error

    def open(self) -> tuple[Line, Cgroup]:
        """A session's channel, and the cgroup it is in; raises `SandboxLostError` after which
        the sandbox is dead."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.line.send({"order": "open"}, (theirs.fileno(),))
                self.line.receive(_FORK_S, expected="opened", started=False)
                pidfd = self.line.take_fd()
        except (RefusedError, SandboxLostError) as error:
            ours.close()
            started = isinstance(error, SandboxLostError) and error.started
            raise self.lost(SandboxLostError(str(error), started=started)) from error
        cgroup = self._new_cgroup()
        try:
            cgroup.add(_pid_of(pidfd))
        except OSError:
            pass  # it has ended already, or cannot be moved: limited by process all the same
        finally:
            os.close(pidfd)
        return Line(Channel(ours)), cgroup

    def kill(self) -> None:
        """End it and everything inside. Safe to call twice and from any thread."""
        end_child(self._child)
        self.line.hang_up()

    def close(self) -> None:
        """`kill` and free what it holds; only while no thread is in a call."""
        self.kill()
        self._free()

    def lost(self, why: SandboxLostError) -> SandboxLostError:
        """Close it; `why` with what it wrote last."""
        self.kill()
        said = ""
        if not self._log.closed:
            self._log.seek(0)
            said = self._log.read()[-2000:].decode("utf-8", "replace").strip()
        self.close()
        text = f"sandbox lost: {why}" + (f"; it wrote: {said}" if said else "")
        return SandboxLostError(text, started=why.started)

    def _command(self) -> list[str]:
        text = self._settings.to_json()
        command = walled_command(text) if self._settings.walled else open_command(text)
        entrances = self._cgroup.entrances if self._cgroup else []
        return staged(command, user=self._user.number if self._user else None, cgroups=entrances)

    def _new_cgroup(self) -> Cgroup:
        number = self._settings.num_processes + _OWN_PROCESSES
        return new_cgroup(memory_mib=self._total_memory_mib, num_processes=number)

    def _free(self) -> None:
        self.line.close()
        self._log.close()
        if self._cgroup is not None:
            self._cgroup.close()
        if self._user is not None:
            self._user.close()


def _pid_of(pidfd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    return int(text.partition("\nPid:")[2].split()[0])


def _read_answer(answer: dict[str, Any], timeout_s: float) -> tuple[ToolStatus, str]:
    if answer["end"] == "timeout":
        return ToolStatus.timeout, f"Timed out after {timeout_s:g} s."
    if answer["end"] == "cpu":
        return ToolStatus.timeout, "Timed out: the limit of CPU time was reached."
    if answer["end"] == "cancelled":
        return ToolStatus.infra_error, "The call was cancelled."
    code = int(answer["code"])
    stdout, stderr = str(answer["stdout"]).strip(), str(answer["stderr"]).strip()
    if code == 0:
        note = f"\n[{answer['num_cut']} more bytes cut]" if answer["num_cut"] else ""
        return ToolStatus.ok, stdout + note
    if code < 0 and not stderr:
        stderr = f"Killed by signal {-code} ({signal.strsignal(-code) or 'unknown'})."
    return ToolStatus.user_error, stderr

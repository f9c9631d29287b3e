"""The host side of one sandbox and its sessions.

It starts the guest program and speaks the protocol that `guest.supervisor` describes; it checks
every message of the guest against `guest.messages.GUEST_EVENTS`. All calls block, and each object
is used by one thread at a time. Only `Sandbox.kill` and `CancelToken.cancel` may be called from any
thread; a call that waits then ends at once, with `SandboxLostError` or as cancelled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.cgroup import create_cgroup
from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.guest.messages import GUEST_EVENTS
from mega_agentrl.sandbox.isolation import isolated_command, pre_exec_command, unisolated_command
from mega_agentrl.sandbox.process import kill_child, read_log_tail, start_child
from mega_agentrl.sandbox.uid_lease import lease_uid
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.sandbox.cgroup import Cgroup
    from mega_agentrl.sandbox.guest.settings import GuestSettings

MAX_OUTPUT_CHARS = 4000
"""Longer output is cut with a note: about 1,000 tokens, more than a policy reads."""

_REPLY_GRACE_S = 60.0
"""Time on top of a call's own timeout, for killing and the reply.

Longer than the deadlines of the guest for that (`guest.processes.STOP_TIMEOUT_S` and those of
`guest.workspace.manager`): the guest ends an interpreter that cannot be stopped, and says so.
"""

_FORK_TIMEOUT_S = 120.0
"""Time for a fork; longer than the deadlines of `guest.interpreter_manager` for its steps."""

_END_S = 1.0
"""Time in which a sandbox that was killed ends. A session whose channel broke waits as long."""

_NUM_GUEST_PROCESSES = 32
"""Processes of a cgroup beside those that one interpreter may start: supervisor, helpers, forks."""


class SandboxLostError(RuntimeError):
    """The sandbox died, broke the protocol or missed a deadline; it must be replaced.

    Attributes:
        may_have_run: Whether the code may have run, so that the call must not be repeated.
        num_oom_kills: How many processes of a sandbox without sessions were killed for memory.
    """

    def __init__(self, message: str, *, may_have_run: bool, num_oom_kills: int = 0) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run
        self.num_oom_kills = num_oom_kills


class RequestRefusedError(RuntimeError):
    """The sandbox works but refused the order; no code ran."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SandboxResult:
    """The outcome of one call."""

    status: ToolStatus
    """Status of the call at its end."""
    output: str
    """Standard output if the code succeeded, else its error text; long output is cut."""
    latency_s: float
    """Time from sending the code to the reply; waiting for a free sandbox is not included."""
    state_lost: bool = False
    """Whether the state of a session's earlier calls was lost before this call began."""
    is_alive: bool = True
    """Whether the state of a session outlived this call."""
    num_oom_kills: int = 0
    """Processes that were killed for memory since the session's call before, if the call failed;
    those of the session's forks count too."""


ReadOutcome = Callable[[dict[str, Any], float], tuple[ToolStatus, str]]


class CancelToken:
    """Lets any thread cancel one call before, while or after it runs."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._connection: GuestConnection | None = None
        self._call_id = 0

    def cancel(self) -> None:
        """End the call at once, or keep it from starting."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                self._connection.send_cancel(self._call_id)

    def bind(self, connection: GuestConnection, call_id: int) -> bool:
        """Attach the token to a call about to be sent; return False if it is already cancelled."""
        with self._lock:
            self._connection, self._call_id = connection, call_id
            return not self.cancelled


def read_python_outcome(reply: dict[str, Any], timeout_s: float) -> tuple[ToolStatus, str]:
    """Return the status and output of a Python call from the event of its end.

    The output is the standard output if the code succeeded, else its error text. Long output is
    cut: the end of standard output, the beginning of an error text.
    """
    if reply["end"] != "exit":
        return read_limit_outcome(reply["end"], timeout_s)
    code = reply["code"]
    stdout, stderr = reply["stdout"].strip(), reply["stderr"].strip()
    if code == 0:
        num_dropped = reply["num_dropped_bytes"]
        note = f"\n[{num_dropped} more bytes cut]" if num_dropped else ""
        output, num_cut = stdout + note, len(stdout + note) - MAX_OUTPUT_CHARS
        if num_cut > 0:
            output = f"{output[:MAX_OUTPUT_CHARS]}\n[{num_cut} more characters cut]"
        return ToolStatus.ok, output
    if code < 0 and not stderr:
        stderr = f"Killed by signal {-code} ({signal.strsignal(-code) or 'unknown'})."
    num_cut = len(stderr) - MAX_OUTPUT_CHARS
    if num_cut > 0:
        stderr = f"[{num_cut} characters cut]\n{stderr[-MAX_OUTPUT_CHARS:]}"
    return ToolStatus.user_error, stderr


def read_limit_outcome(end: str, timeout_s: float) -> tuple[ToolStatus, str]:
    """Return the status and output of a call that hit a limit or was cancelled."""
    if end == "timeout":
        return ToolStatus.timeout, f"Timed out after {timeout_s:g} s."
    if end == "cpu":
        return ToolStatus.timeout, "Timed out: the limit of CPU time was reached."
    return ToolStatus.infra_error, "The call was cancelled."


class GuestConnection:
    """One channel to the guest, which runs one call at a time.

    Args:
        channel: The channel.
        read_outcome: Returns the status and output of a call from the event of its end and its
            timeout.
    """

    def __init__(self, channel: Channel, read_outcome: ReadOutcome) -> None:
        self._channel = channel
        self._read_outcome = read_outcome
        self._send_lock = threading.Lock()
        self._call_lock = threading.Lock()  # the thread of a cancelled call may still be waiting
        self._call_id = 0

    def call(
        self, code: str, timeout_s: float, cancel_token: CancelToken, kind: str = "default"
    ) -> SandboxResult:
        """Run `code`; `kind` is that of `guest.workspace.process`.

        Raises:
            RequestRefusedError: The code did not run.
            SandboxLostError: The sandbox is lost.
        """
        with self._call_lock:
            return self._call_locked(code, timeout_s, cancel_token, kind)

    def fork(self) -> GuestConnection:
        """Fork the session and return the connection to the fork.

        Raises:
            RequestRefusedError: The session cannot be forked and is unchanged.
            SandboxLostError: The sandbox is lost.
        """
        host_end, guest_end = socket.socketpair()
        try:
            with guest_end, self._call_lock:
                self.send({"order": "fork"}, (guest_end.fileno(),))
                self.receive(_FORK_TIMEOUT_S, expected="forked", may_have_run=True)
        except (RequestRefusedError, SandboxLostError):
            host_end.close()
            raise
        return GuestConnection(_host_channel(host_end), self._read_outcome)

    def prepare(self) -> None:
        """Let the session start its first interpreter; raises `SandboxLostError`."""
        self.send({"order": "prepare"})

    def _call_locked(
        self, code: str, timeout_s: float, cancel_token: CancelToken, kind: str
    ) -> SandboxResult:
        start_time = time.monotonic()
        self._call_id += 1
        if not cancel_token.bind(self, self._call_id):
            raise RequestRefusedError("the call was cancelled")
        order = {"id": self._call_id, "kind": kind, "code": code, "timeout_s": timeout_s}
        self.send({"order": "run"} | order)
        if cancel_token.cancelled:  # its cancel message may have preceded the order
            self.send_cancel(self._call_id)
        # A session that was forked continues in a fork of its own, which is made now.
        self.receive(_FORK_TIMEOUT_S, expected="started", may_have_run=False)
        reply = self.receive(timeout_s + _REPLY_GRACE_S, expected="done", may_have_run=True)
        if reply["id"] != self._call_id:
            text = f"got the end of call {reply['id']}, expected {self._call_id}"
            raise SandboxLostError(text, may_have_run=True)
        status, output = self._read_outcome(reply, timeout_s)
        latency_s = time.monotonic() - start_time
        return SandboxResult(
            status=status,
            output=output,
            latency_s=latency_s,
            state_lost=reply["state_lost"],
            is_alive=reply["alive"],
        )

    def send_cancel(self, call_id: int) -> None:
        """Ask the guest to end the call `call_id` if it is running."""
        with contextlib.suppress(OSError), self._send_lock:
            self._channel.send({"order": "cancel", "id": call_id}, timeout_s=1.0)

    def send(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send an order; raises `SandboxLostError`."""
        try:
            with self._send_lock:
                self._channel.send(order, fds, timeout_s=_REPLY_GRACE_S)
        except OSError as error:
            raise SandboxLostError(f"cannot send an order: {error}", may_have_run=False) from error

    def receive(self, timeout_s: float, *, expected: str, may_have_run: bool) -> dict[str, Any]:
        """Wait for the next event and return it.

        Args:
            timeout_s: How long to wait.
            expected: Name of the expected event.
            may_have_run: The attribute `may_have_run` of a `SandboxLostError`.

        Raises:
            RequestRefusedError: The guest answered `failed`.
            SandboxLostError: The channel broke, timed out or sent another event.
        """
        try:
            message = self._channel.receive(timeout_s=timeout_s)
        except TimeoutError as error:
            text = f"no answer within {timeout_s:g} s"
            raise SandboxLostError(text, may_have_run=may_have_run) from error
        except CONNECTION_ERRORS as error:
            raise SandboxLostError(str(error), may_have_run=may_have_run) from error
        if message["event"] == "failed":
            raise RequestRefusedError(message["error"])
        if message["event"] != expected:
            text = f"got {message['event']}, expected {expected}"
            raise SandboxLostError(text, may_have_run=may_have_run)
        return message

    def take_fd(self) -> int:
        """Return the descriptor that came with the last event; raises `SandboxLostError`."""
        try:
            return self._channel.take_fds(1)[0]
        except ValueError as error:
            raise SandboxLostError(str(error), may_have_run=False) from error

    def shutdown(self) -> None:
        """End all waits at either end of the channel."""
        with contextlib.suppress(OSError):  # it is closed already
            self._channel.shutdown()

    def close(self) -> None:
        """Close the channel; only while no thread waits on it."""
        self._channel.close()


class Sandbox:
    """An isolated guest program with a warm interpreter.

    The constructor starts the program and returns once the interpreter is warm.

    Args:
        settings: Mode and limits.
        total_memory_mib: Limit of the cgroup.
        start_timeout_s: Time for the start.
        layers: Folders of this machine by their mount points in the sandbox (`isolated_command`).
        read_outcome: See `GuestConnection`.

    Raises:
        SandboxLostError: The guest did not start.
        ValueError: No user id is free.
    """

    def __init__(
        self,
        settings: GuestSettings,
        *,
        total_memory_mib: int = 2048,
        start_timeout_s: float = 120.0,
        layers: Mapping[str, str] | None = None,
        read_outcome: ReadOutcome = read_python_outcome,
    ) -> None:
        self._settings = settings
        self._layers = layers or {}
        self._read_outcome = read_outcome
        self._total_memory_mib = total_memory_mib
        self.num_sessions = 0
        self._uid_lease = lease_uid() if settings.isolated else None
        self._cgroup = self._create_cgroup() if not settings.stateful else None
        self._log = tempfile.TemporaryFile()
        host_end, guest_end = socket.socketpair()
        self.connection = GuestConnection(_host_channel(host_end, max_fds=1), read_outcome)
        try:
            with guest_end:
                self._child = start_child(
                    self._command(), stdin=guest_end.fileno(), stderr=self._log
                )
        except OSError as error:
            self._release_resources()
            raise SandboxLostError(f"sandbox did not start: {error}", may_have_run=False) from error
        try:
            self.connection.receive(start_timeout_s, expected="up", may_have_run=False)
        except SandboxLostError as error:
            raise self.close_as_lost(error) from error

    @property
    def pid(self) -> int:
        """Host process id of the sandbox's outermost process."""
        return self._child.pid

    def call(
        self, code: str, timeout_s: float, cancel_token: CancelToken | None = None
    ) -> SandboxResult:
        """Run `code` in a fresh interpreter; `SandboxLostError` means that the sandbox is dead."""
        try:
            return self.connection.call(code, timeout_s, cancel_token or CancelToken())
        except RequestRefusedError as error:
            if cancel_token is not None and cancel_token.cancelled:
                raise
            raise self.close_as_lost(SandboxLostError(str(error), may_have_run=False)) from error
        except SandboxLostError as error:
            raise self.close_as_lost(error) from error

    def open(self) -> tuple[GuestConnection, Cgroup]:
        """Open a session; return its connection and its cgroup.

        The session's supervisor is moved into the cgroup while it has no children, so that
        everything that it starts later is born there.

        Raises:
            RequestRefusedError: The session cannot be set up; others are unchanged.
            SandboxLostError: The sandbox is dead.
        """
        host_end, guest_end = socket.socketpair()
        connection = GuestConnection(_host_channel(host_end), self._read_outcome)
        try:
            with guest_end:
                self.connection.send({"order": "open"}, (guest_end.fileno(),))
                self.connection.receive(_FORK_TIMEOUT_S, expected="opened", may_have_run=False)
                pidfd = self.connection.take_fd()
        except RequestRefusedError:
            connection.close()
            raise
        except SandboxLostError as error:
            connection.close()
            raise self.close_as_lost(error) from error
        cgroup = self._create_cgroup()
        try:
            cgroup.add(_pid_from_pidfd(pidfd))
            connection.prepare()
        except (OSError, SandboxLostError) as error:
            connection.close()
            cgroup.close()
            raise RequestRefusedError(f"a session cannot be set up: {error}") from error
        finally:
            os.close(pidfd)
        return connection, cgroup

    def has_ended(self) -> bool:
        """Return whether the whole sandbox has ended, or ends at this moment."""
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the sandbox and everything in it. Safe to call twice and from any thread."""
        kill_child(self._child)
        self.connection.shutdown()

    def close(self) -> None:
        """Kill the sandbox and release its resources; only while no thread is in a call."""
        self.kill()
        self._release_resources()

    def close_as_lost(self, error: SandboxLostError) -> SandboxLostError:
        """Close the sandbox; return `error` with the end of the sandbox's log appended."""
        self.kill()
        log_tail = "" if self._log.closed else read_log_tail(self._log, 2000)
        num_oom_kills = self._cgroup.num_oom_kills if self._cgroup else 0
        self.close()
        text = f"sandbox lost: {error}" + (f"; it wrote: {log_tail}" if log_tail else "")
        return SandboxLostError(text, may_have_run=error.may_have_run, num_oom_kills=num_oom_kills)

    def _command(self) -> list[str]:
        text = self._settings.to_json()
        if self._settings.isolated:
            command = isolated_command(text, self._layers)
        else:
            command = unisolated_command(text)
        procs_files = self._cgroup.procs_files if self._cgroup else []
        return pre_exec_command(
            command, user=self._uid_lease.uid if self._uid_lease else None, cgroups=procs_files
        )

    def _create_cgroup(self) -> Cgroup:
        num_processes = self._settings.num_processes + _NUM_GUEST_PROCESSES
        return create_cgroup(memory_mib=self._total_memory_mib, num_processes=num_processes)

    def _release_resources(self) -> None:
        self.connection.close()
        self._log.close()
        if self._cgroup is not None:
            self._cgroup.close()
        if self._uid_lease is not None:
            self._uid_lease.close()


def _host_channel(host_end: socket.socket, *, max_fds: int = 0) -> Channel:
    return Channel(host_end, accepts=GUEST_EVENTS, max_fds=max_fds)


def _pid_from_pidfd(pidfd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    return int(text.partition("\nPid:")[2].split()[0])

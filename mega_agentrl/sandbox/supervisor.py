"""The outer end of one sandbox: starts the inner program and speaks its protocol.

Blocking and used by one thread at a time, except `kill`, which any thread may call and which
makes a waiting `call` end at once with `SandboxLostError`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.interpreter import receive_frame, send_frame
from mega_agentrl.sandbox.isolation import interpreter_command
from mega_agentrl.sandbox.process import end_child, start_child
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from mega_agentrl.sandbox.interpreter import Settings

_GRACE_S = 5.0
"""Beyond a call's own deadline, for its fork, its kill and the way back."""


class SandboxLostError(RuntimeError):
    """The sandbox died, broke the protocol or is past its deadline; it must be replaced.

    started: the code may have run, so the call must not be repeated.
    """

    def __init__(self, message: str, *, started: bool) -> None:
        super().__init__(message)
        self.started = started


@dataclass(slots=True, kw_only=True, frozen=True)
class SandboxResult:
    """How one call went. `output`: stdout where the code succeeded, else its error text.

    latency_s: from sending the code to the answer; waiting for a free sandbox not included.
    """

    status: ToolStatus
    output: str
    latency_s: float


class Sandbox:
    """One warm interpreter behind its wall."""

    def __init__(self, settings: Settings, *, start_deadline_s: float = 120.0) -> None:
        """Start it and wait until it is warm; raises `SandboxLostError`."""
        self._log = tempfile.TemporaryFile()
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                command = interpreter_command(settings.to_json())
                self._child = start_child(command, stdin=theirs.fileno(), stderr=self._log)
        except OSError as error:
            self._channel.close()
            self._log.close()
            raise SandboxLostError(f"sandbox did not start: {error}", started=False) from error
        self._receive(start_deadline_s, expected=("ready",), started=False)

    def call(self, code: str, timeout_s: float) -> SandboxResult:
        """Run `code`; raises `SandboxLostError` after which the sandbox is dead."""
        begin = time.monotonic()
        try:
            self._channel.settimeout(_GRACE_S)
            send_frame(self._channel, {"code": code, "timeout_s": timeout_s})
        except OSError as error:
            raise self._lost(f"cannot send the code: {error}", started=False) from error
        self._receive(_GRACE_S, expected=("started",), started=False)
        deadline_s = timeout_s + _GRACE_S
        answer = self._receive(deadline_s, expected=("done", "failed"), started=True)
        if answer["event"] == "failed":
            raise self._lost(str(answer["error"]), started=False)
        status, output = _read_answer(answer, timeout_s)
        return SandboxResult(status=status, output=output, latency_s=time.monotonic() - begin)

    def kill(self) -> None:
        """End it and everything inside. Safe to call twice and from any thread."""
        end_child(self._child)
        with contextlib.suppress(OSError):  # the peer or an earlier call has closed it
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """`kill` and free its descriptors; only while no thread is in `call`."""
        self.kill()
        self._channel.close()
        self._log.close()

    def _receive(
        self, timeout_s: float, *, expected: tuple[str, ...], started: bool
    ) -> dict[str, Any]:
        try:
            self._channel.settimeout(timeout_s)
            message = receive_frame(self._channel)
        except TimeoutError as error:
            raise self._lost(f"no answer within {timeout_s:g} s", started=started) from error
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(str(error), started=started) from error
        if message.get("event") not in expected:
            raise self._lost(f"got {message.get('event')}, expected {expected}", started=started)
        return message

    def _lost(self, why: str, *, started: bool) -> SandboxLostError:
        self.kill()
        self._log.seek(0)
        said = self._log.read()[-2000:].decode("utf-8", "replace").strip()
        self.close()
        text = f"sandbox lost: {why}" + (f"; it wrote: {said}" if said else "")
        return SandboxLostError(text, started=started)


def _read_answer(answer: dict[str, Any], timeout_s: float) -> tuple[ToolStatus, str]:
    if answer["end"] == "timeout":
        return ToolStatus.timeout, f"Timed out after {timeout_s:g} s."
    if answer["end"] == "processes":
        return ToolStatus.user_error, "Stopped: too many processes."
    code = int(answer["code"])
    stdout, stderr = str(answer["stdout"]).strip(), str(answer["stderr"]).strip()
    if code == 0:
        note = f"\n[{answer['num_cut']} more bytes cut]" if answer["num_cut"] else ""
        return ToolStatus.ok, stdout + note
    if code < 0 and not stderr:
        stderr = f"Killed by signal {-code} ({signal.strsignal(-code) or 'unknown'})."
    return ToolStatus.user_error, stderr

"""The supervisor's loop: serves the host's orders with interpreters.

A stateless sandbox has one supervisor, which serves one call after the other. A stateful one has a
supervisor for each session and its forks, a process that the zygote forks (`zygote`). Whatever the
policy's code does to its supervisor, no other session has that supervisor.

It is one thread. A turn of its loop reads a bounded number of bytes and messages from each
descriptor and then checks the deadlines. Everything that it waits for has a deadline. It checks
every message against a table (`messages`); an interpreter that sends any other, or more than one
event in a call, is killed.

Protocol, on the main channel (calls of a stateless sandbox, opening sessions) and on one channel
per session. `messages` has the types and bounds of all fields::

    <- {"event": "up"}                                     main, once: warm
    -> {"order": "run", "id": n, "kind": str, "code": str, "timeout_s": float}  main or session
    <- {"event": "started", "id": n}                       from here on the code may have run
    <- {"event": "done", "id": n, "end": "exit" | "timeout" | "cpu" | "cancelled",
        "code": int, "stdout": str, "stderr": str, "num_dropped_bytes": int,
        "state_lost": bool, "alive": bool}
    -> {"order": "cancel", "id": n}                        ignored unless call n is running
    -> {"order": "open"} + channel    <- {"event": "opened"} + pidfd        main, to the zygote
    -> {"order": "prepare"}                                session, once: no answer
    -> {"order": "fork"} + channel    <- {"event": "forked"}                session, idle
    or, in reply to any of them, {"event": "failed", "error": str}: the code did not run
    -> end of the channel                                  the session is closed

kind: "default", or for a workspace also "clean" and "edit" (`workspace.process`).
state_lost: the state of earlier calls was lost before this one. alive: this call's state is kept.
num_dropped_bytes: bytes cut from the end of stdout and the beginning of stderr, whose last line is
the one that matters. A negative code is a signal.

To add an order, add its messages above and in `messages`, its handler in `Supervisor`, the method
that sends it in `client`, and a test in `tests/sandbox/guest/test_supervisor.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.guest import processes
from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.guest.interpreter_manager import (
    InterpreterManager,
    InterpreterProcess,
    SeccompListener,
)
from mega_agentrl.sandbox.guest.messages import HOST_ORDERS
from mega_agentrl.sandbox.guest.workspace.manager import WorkspaceManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.sandbox.guest.settings import GuestSettings

_POLL_INTERVAL_S = 0.1
_MAX_ERROR_CHARS = 4000
_MAX_READS_PER_TURN = 16
"""Reads of 64 KiB from a pipe before other events are served."""

_MAX_LAST_READS = 256
"""Reads at a call's end: a pipe has at most this many buffers, and a read may return only one."""


class OutputBuffer:
    """The first and the last bytes that come through a pipe.

    Args:
        fd: The pipe's read end.
        num_first_bytes: How many bytes to keep of the beginning.
        num_last_bytes: How many bytes to keep of the rest.
    """

    def __init__(self, fd: int, num_first_bytes: int, num_last_bytes: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.num_dropped_bytes = 0
        self._num_first_bytes = num_first_bytes
        self._num_last_bytes = num_last_bytes
        self._first = bytearray()
        self._last = bytearray()

    def drain(self, *, num_reads: int = _MAX_READS_PER_TURN) -> bool:
        """Read what is available with at most `num_reads`; return False at the pipe's end."""
        for _ in range(num_reads):
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            num_free = self._num_first_bytes - len(self._first)
            self._first += chunk[:num_free]
            self._last += chunk[num_free:]
            num_extra = len(self._last) - self._num_last_bytes
            if num_extra > 0:
                self.num_dropped_bytes += num_extra
                del self._last[:num_extra]
        return True

    def text(self) -> str:
        """Return the buffered bytes as text; a note marks a gap between the two parts."""
        has_gap = self.num_dropped_bytes and self._first and self._last
        note = f"\n[{self.num_dropped_bytes} bytes cut]\n" if has_gap else ""
        return (self._first + note.encode() + self._last).decode("utf-8", "replace")


class RunningCall:
    """A call that is running, with its deadline and its output so far."""

    def __init__(
        self,
        client: GuestClient,
        interpreter: InterpreterProcess,
        order: dict[str, Any],
        settings: GuestSettings,
    ) -> None:
        self.client = client
        self.interpreter = interpreter
        self.call_id = order["id"]
        self.deadline = time.monotonic() + float(order["timeout_s"])
        self.start_cpu_s = processes.cpu_time_s(interpreter.pid)
        size = settings.max_output_bytes
        # A workspace writes everything to stdout, where both ends matter.
        num_last = size // 2 if settings.workspace is not None else 0
        self.stdout = OutputBuffer(interpreter.output_fds[0], size - num_last, num_last)
        self.stderr = OutputBuffer(interpreter.output_fds[1], 0, size)


def make_interpreter_manager(settings: GuestSettings) -> InterpreterManager:
    """Return the manager of interpreters, or of workspaces if the settings have one."""
    if settings.workspace is not None:
        return WorkspaceManager(settings, settings.workspace)
    return InterpreterManager(settings)


class GuestClient:
    """A channel and its state: the main channel, or that of a session with its interpreter."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.interpreter: InterpreterProcess | None = None
        self.state_lost = False
        self.call: RunningCall | None = None


class Supervisor:
    """Serves the calls of a stateless sandbox, or one session and its forks.

    Args:
        settings: Mode and limits.
        channel: The main channel, or the session's.
    """

    def __init__(self, settings: GuestSettings, channel: Channel) -> None:
        self._settings = settings
        self._interpreters = make_interpreter_manager(settings)
        self._spare_interpreter: InterpreterProcess | None = None
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._calls: set[RunningCall] = set()
        self._clients: set[GuestClient] = set()
        self._add_client(GuestClient(channel))

    def serve_main(self, channel: Channel) -> None:
        """Prove that interpreters work, say so on the main channel, and serve."""
        self._spare_interpreter = self._interpreters.spawn()
        channel.send({"event": "up"})
        self.serve()

    def serve(self) -> None:
        """Serve until the last client has closed its channel."""
        while self._clients:
            ready = self._poller.poll(self._poll_timeout_s() * 1000)
            for fd, _ in ready:
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            for call in tuple(self._calls):
                self._check_limits(call)
            if not ready and self._needs_spare():
                self._prepare()
        if self._spare_interpreter is not None:
            self._interpreters.release(self._spare_interpreter)

    def _needs_spare(self) -> bool:
        return not self._settings.stateful and self._spare_interpreter is None

    def _poll_timeout_s(self) -> float:
        if self._needs_spare():
            return 0.0
        now = time.monotonic()
        waits = [max(0.0, min(_POLL_INTERVAL_S, call.deadline - now)) for call in self._calls]
        return min(waits, default=3600.0)

    def _prepare(self) -> None:
        """Start an interpreter ahead of the call that needs it, which tries again if this fails."""
        if self._spare_interpreter is None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                self._spare_interpreter = self._interpreters.spawn()

    def _watch(self, fd: int, handler: Callable[[], None], event: int = select.POLLIN) -> None:
        self._handlers[fd] = handler
        self._poller.register(fd, event)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _read_orders(self, client: GuestClient) -> None:
        try:
            for order in client.channel.receive_available():
                self._handle_order(client, order)
        except CONNECTION_ERRORS:
            self._disconnect(client)

    def _handle_order(self, client: GuestClient, order: dict[str, Any]) -> None:
        kind = order["order"]
        if kind == "cancel":
            if client.call is not None and client.call.call_id == order["id"]:
                self._finish_call(client.call, "cancelled")
            return
        try:
            if kind == "run":
                self._run(client, order)
            elif kind == "prepare":
                self._prepare()
            elif kind == "fork" and self._settings.stateful:
                self._fork(client)
            else:
                raise ValueError(f"got the order {kind}, which this channel does not accept")
        except CONNECTION_ERRORS as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            text = f"{error} {notes}".strip().encode("utf-8", "replace").decode()
            client.channel.send({"event": "failed", "error": text[:_MAX_ERROR_CHARS]})

    def _disconnect(self, client: GuestClient) -> None:
        """Release the call and the interpreter of a client whose channel has closed."""
        self._unwatch(client.channel.fileno())
        if client.call is not None:
            self._finish_call(client.call, "cancelled", silent=True)
        if client.interpreter is not None:
            self._release_interpreter(client.interpreter)
            client.interpreter = None
        client.channel.close()
        self._clients.discard(client)

    def _fork(self, client: GuestClient) -> None:
        (fd,) = client.channel.take_fds(1)
        session = GuestClient(Channel(socket.socket(fileno=fd), accepts=HOST_ORDERS, max_fds=1))
        try:
            if client.interpreter is None:
                session.state_lost = client.state_lost
            else:
                session.interpreter = self._interpreters.fork(client.interpreter)
                self._watch_listener(session.interpreter)
        except CONNECTION_ERRORS:
            session.channel.close()
            raise
        self._add_client(session)
        client.channel.send({"event": "forked"})

    def _add_client(self, client: GuestClient) -> None:
        self._clients.add(client)
        self._watch(client.channel.fileno(), lambda: self._read_orders(client))

    def _take_fresh_interpreter(self) -> InterpreterProcess:
        interpreter, self._spare_interpreter = self._spare_interpreter, None
        if interpreter is None or interpreter.has_exited():
            if interpreter is not None:
                self._interpreters.release(interpreter)
            interpreter = self._interpreters.spawn()
        self._watch_listener(interpreter)
        return interpreter

    def _watch_listener(self, interpreter: InterpreterProcess) -> None:
        """Start to answer the filter's notifications; forks share the listener of their parent."""
        listener = interpreter.listener
        if listener is not None and listener.fd not in self._handlers:
            self._watch(listener.fd, lambda: self._respond(listener))

    def _respond(self, listener: SeccompListener) -> None:
        if not listener.respond():
            self._unwatch(listener.fd)

    def _release_interpreter(self, interpreter: InterpreterProcess) -> None:
        listener = interpreter.listener
        if listener is not None:
            self._unwatch(listener.fd)
        self._interpreters.release(interpreter)
        if listener is not None and listener.ref_count:
            self._watch(listener.fd, lambda: self._respond(listener))

    def _run(self, client: GuestClient, order: dict[str, Any]) -> None:
        interpreter = self._interpreter_for(client)
        call = RunningCall(client, interpreter, order, self._settings)
        with contextlib.suppress(OSError):  # its pidfd will report its end
            interpreter.control.send_nowait(
                {name: order[name] for name in ("order", "id", "kind", "code")}
            )
        client.call = call
        self._calls.add(call)
        if self._settings.stateful:
            self._interpreters.resume(interpreter)
        client.channel.send({"event": "started", "id": call.call_id})
        self._watch(interpreter.pidfd, lambda: self._on_interpreter_exit(call))
        for buffer in (call.stdout, call.stderr):
            self._watch(buffer.fd, lambda buffer=buffer: self._drain(buffer))  # type: ignore[misc]
        self._write_code(call)

    def _on_interpreter_exit(self, call: RunningCall) -> None:
        # Otherwise the event belonged to an earlier process with this descriptor.
        if call.interpreter.has_exited():
            self._finish_call(call, "cpu" if self._exceeds_cpu_limit(call) else "exit")

    def _exceeds_cpu_limit(self, call: RunningCall) -> bool:
        return (
            processes.cpu_time_s(call.interpreter.pid) - call.start_cpu_s
            > self._settings.cpu_limit_s
        )

    def _interpreter_for(self, client: GuestClient) -> InterpreterProcess:
        interpreter = client.interpreter
        if interpreter is not None and interpreter.has_exited():
            self._release_interpreter(interpreter)
            interpreter, client.interpreter, client.state_lost = None, None, True
        if interpreter is None:
            interpreter = self._take_fresh_interpreter()
        elif interpreter.retired:
            fork = self._interpreters.fork(interpreter)
            self._watch_listener(fork)
            self._release_interpreter(interpreter)
            interpreter = fork
        if self._settings.stateful:
            client.interpreter = interpreter
        return interpreter

    def _write_code(self, call: RunningCall) -> None:
        """Continue to write the code to the interpreter, then wait for its event."""
        control = call.interpreter.control
        try:
            done = control.flush()
        except OSError:
            done = True  # its pidfd will report its end
        event = select.POLLIN if done else select.POLLOUT
        handler = (
            (lambda: self._read_done_event(call)) if done else (lambda: self._write_code(call))
        )
        self._watch(control.fileno(), handler, event)

    def _drain(self, buffer: OutputBuffer) -> None:
        if not buffer.drain():
            self._unwatch(buffer.fd)

    def _read_done_event(self, call: RunningCall) -> None:
        try:
            events = call.interpreter.control.receive_available()
        except ValueError:  # not a frame that our interpreter sends
            self._finish_call(call, "exit")
            return
        except (EOFError, OSError):  # the interpreter closed the channel; its pidfd reports its end
            self._unwatch(call.interpreter.control.fileno())
            return
        if not events:
            return
        event = events[0]
        is_valid = len(events) == 1 and event["event"] == "done" and event["id"] == call.call_id
        self._finish_call(call, "exit", code=event["code"] if is_valid else None)

    def _check_limits(self, call: RunningCall) -> None:
        if time.monotonic() >= call.deadline:
            self._finish_call(call, "timeout")
        elif self._exceeds_cpu_limit(call):
            self._finish_call(call, "cpu")

    def _finish_call(
        self, call: RunningCall, end: str, *, code: int | None = None, silent: bool = False
    ) -> None:
        """End a call whose interpreter has finished it (`code`), has exited or has hit a limit."""
        client, interpreter = call.client, call.interpreter
        if call not in self._calls:
            return
        self._calls.discard(call)
        client.call = None
        for fd in (interpreter.pidfd, interpreter.control.fileno(), *interpreter.output_fds):
            self._unwatch(fd)
        alive = self._settings.stateful and self._interpreters.end_call(
            interpreter, is_done=code is not None
        )
        if not alive:
            code = self._kill_interpreter(interpreter, code)
        for buffer in (call.stdout, call.stderr):
            buffer.drain(num_reads=_MAX_LAST_READS)
        state_lost = client.state_lost
        client.state_lost = self._settings.stateful and not alive
        outputs = {"stdout": call.stdout.text(), "stderr": call.stderr.text()}
        event = {
            "event": "done",
            "id": call.call_id,
            "end": end,
            "code": -signal.SIGKILL if code is None else code,
            "state_lost": state_lost,
            "alive": alive,
            "num_dropped_bytes": call.stdout.num_dropped_bytes + call.stderr.num_dropped_bytes,
        } | outputs
        if not silent:
            with contextlib.suppress(*CONNECTION_ERRORS):
                client.channel.send(event, timeout_s=5.0)
        if not alive:
            client.interpreter = None
            self._release_interpreter(interpreter)

    def _kill_interpreter(self, interpreter: InterpreterProcess, code: int | None) -> int:
        """Kill an interpreter and its descendants; return `code`, or its exit code if None."""
        has_children = bool(processes.child_pids(interpreter.pid))
        interpreter.send_signal(signal.SIGKILL)
        if code is not None and not has_children:
            return code
        # Process 1 of a PID namespace ends only after all others, so none is left then.
        poller = select.poll()
        poller.register(interpreter.pidfd, select.POLLIN)
        poller.poll(5000)
        if code is not None:
            return code
        if interpreter.parent is not None:  # not our child: its exit status is unknown
            return -signal.SIGKILL
        info = os.waitid(os.P_PIDFD, interpreter.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return -signal.SIGKILL
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

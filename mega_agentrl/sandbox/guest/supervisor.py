"""The supervisor's loop: serves the host's orders with interpreters.

It is one thread. The policy's code cannot block it: it waits only for interpreters that run none of
that code, and then with a deadline.

Protocol, on the main channel (calls of a stateless sandbox, opening sessions) and on one channel
per session::

    <- {"event": "up"}                                     main, once: warm
    -> {"order": "run", "id": n, "code": str, "timeout_s": float}      main or session
    <- {"event": "started", "id": n}                       from here on the code may have run
    <- {"event": "done", "id": n, "end": "exit" | "timeout" | "cpu" | "cancelled",
        "code": int, "stdout": str, "stderr": str, "num_dropped_bytes": int,
        "state_lost": bool, "alive": bool}
    -> {"order": "cancel", "id": n}                        ignored unless call n is running
    -> {"order": "open"} + channel    <- {"event": "opened"} + pidfd        main
    -> {"order": "fork"} + channel    <- {"event": "forked"}                session, idle
    or, in reply to any of them, {"event": "failed", "error": str}: the code did not run
    -> end of the channel                                  the session is closed

state_lost: the state of earlier calls was lost before this one. alive: this call's state is kept.
num_dropped_bytes: bytes cut from the end of stdout and the beginning of stderr, whose last line is
the one that matters. A negative code is a signal.

To add an order: its messages above, its handler in `Supervisor`, the method that sends it in
`client`, a test in `tests/sandbox/guest/test_supervisor.py`.
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
from mega_agentrl.sandbox.guest.interpreter_manager import InterpreterManager, InterpreterProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.sandbox.guest.privileged_helper import PrivilegedHelper
    from mega_agentrl.sandbox.guest.settings import GuestSettings

_POLL_INTERVAL_S = 0.1
MAX_DRAIN_BYTES = 1 << 20
"""Bytes read from a pipe before other events are served."""


class OutputBuffer:
    """The first or the last bytes that come through a pipe.

    Args:
        fd: The pipe's read end.
        max_bytes: How many bytes to keep.
        keep_end: Whether to keep the last bytes instead of the first.
    """

    def __init__(self, fd: int, max_bytes: int, *, keep_end: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.num_dropped_bytes = 0
        self._max_bytes = max_bytes
        self._keep_end = keep_end
        self._data = bytearray()

    def drain(self, *, num_bytes: int = MAX_DRAIN_BYTES) -> bool:
        """Read what is available, at most about `num_bytes`; return False at the pipe's end."""
        while num_bytes > 0:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            num_bytes -= len(chunk)
            self._data += chunk
            num_extra = len(self._data) - self._max_bytes
            if num_extra > 0:
                self.num_dropped_bytes += num_extra
                self._data = (
                    self._data[num_extra:] if self._keep_end else self._data[: self._max_bytes]
                )
        return True

    def text(self) -> str:
        """Return the buffered bytes as text."""
        return self._data.decode("utf-8", "replace")


class RunningCall:
    """A call that is running, with its deadline and its output so far."""

    def __init__(
        self,
        client: GuestClient,
        interpreter: InterpreterProcess,
        order: dict[str, Any],
        max_output_bytes: int,
    ) -> None:
        self.client = client
        self.interpreter = interpreter
        self.call_id = order["id"]
        self.deadline = time.monotonic() + float(order["timeout_s"])
        self.start_cpu_s = processes.cpu_time_s(interpreter.pid)
        self.stdout = OutputBuffer(interpreter.output_fds[0], max_output_bytes, keep_end=False)
        self.stderr = OutputBuffer(interpreter.output_fds[1], max_output_bytes, keep_end=True)


class GuestClient:
    """A channel and its state: the main channel, or that of a session with its interpreter."""

    def __init__(self, channel: Channel, *, stateful: bool) -> None:
        self.channel = channel
        self.stateful = stateful
        self.interpreter: InterpreterProcess | None = None
        self.state_lost = False
        self.call: RunningCall | None = None


class Supervisor:
    """Serves all clients of one sandbox."""

    def __init__(
        self, settings: GuestSettings, channel: Channel, helper: PrivilegedHelper | None
    ) -> None:
        self._settings = settings
        self._interpreters = InterpreterManager(settings, helper)
        self._spare_interpreter: InterpreterProcess | None = None
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._calls: set[RunningCall] = set()
        self._main_client = GuestClient(channel, stateful=False)
        self._serving = True
        self._sessions: set[GuestClient] = set()
        self._watch(channel.fileno(), lambda: self._read_orders(self._main_client))

    def serve(self) -> None:
        """Serve until the main channel closes; an error of the first interpreter is passed on."""
        self._spare_interpreter = self._interpreters.spawn()
        self._main_client.channel.send({"event": "up"})
        while self._serving:
            ready = self._poller.poll(self._poll_timeout_s() * 1000)
            for fd, _ in ready:
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            for call in tuple(self._calls):
                self._check_limits(call)
            if not ready and self._spare_interpreter is None:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    self._spare_interpreter = self._interpreters.spawn()

    def _poll_timeout_s(self) -> float:
        if self._spare_interpreter is None:
            return 0.0
        now = time.monotonic()
        waits = [max(0.0, min(_POLL_INTERVAL_S, call.deadline - now)) for call in self._calls]
        return min(waits, default=3600.0)

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
            elif kind == "open":
                self._open(client)
            else:
                self._fork(client)
        except CONNECTION_ERRORS as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            client.channel.send({"event": "failed", "error": f"{error} {notes}".strip()})

    def _disconnect(self, client: GuestClient) -> None:
        """Release the call and the interpreter of a client whose channel has closed."""
        self._unwatch(client.channel.fileno())
        if client.call is not None:
            self._finish_call(client.call, "cancelled", silent=True)
        if client.interpreter is not None:
            self._release_interpreter(client.interpreter)
            client.interpreter = None
        client.channel.close()
        self._sessions.discard(client)
        if client is self._main_client:
            self._serving = False
            for session in tuple(self._sessions):
                self._disconnect(session)
            if self._spare_interpreter is not None:
                self._interpreters.release(self._spare_interpreter)

    def _open(self, client: GuestClient) -> None:
        session = GuestClient(self._receive_channel(client), stateful=True)
        session.interpreter = self._take_fresh_interpreter()
        self._interpreters.pause(session.interpreter)
        self._add_session(session)
        client.channel.send({"event": "opened"}, (session.interpreter.pidfd,))

    def _fork(self, client: GuestClient) -> None:
        session = GuestClient(self._receive_channel(client), stateful=True)
        try:
            if client.interpreter is None:
                session.state_lost = True
            else:
                session.interpreter = self._interpreters.fork(client.interpreter)
                self._watch_listener(session.interpreter)
        except CONNECTION_ERRORS:
            session.channel.close()
            raise
        self._add_session(session)
        client.channel.send({"event": "forked"})

    def _receive_channel(self, client: GuestClient) -> Channel:
        return Channel(socket.socket(fileno=client.channel.take_fds(1)[0]))

    def _add_session(self, session: GuestClient) -> None:
        self._sessions.add(session)
        self._watch(session.channel.fileno(), lambda: self._read_orders(session))

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
            self._watch(listener.fd, listener.respond)

    def _release_interpreter(self, interpreter: InterpreterProcess) -> None:
        listener = interpreter.listener
        if listener is not None:
            self._unwatch(listener.fd)
        self._interpreters.release(interpreter)
        if listener is not None and listener.ref_count:
            self._watch(listener.fd, listener.respond)

    def _run(self, client: GuestClient, order: dict[str, Any]) -> None:
        interpreter = self._interpreter_for(client)
        call = RunningCall(client, interpreter, order, self._settings.max_output_bytes)
        with contextlib.suppress(OSError):  # its pidfd will report its end
            interpreter.control.send_nowait({"order": "run", "code": order["code"]})
        client.call = call
        self._calls.add(call)
        if client.stateful:
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
        if client.stateful:
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
        except CONNECTION_ERRORS:
            # The interpreter closed the channel or sent an invalid frame.
            self._unwatch(call.interpreter.control.fileno())
            return
        if events:
            code = events[0].get("code")
            self._finish_call(call, "exit", code=code if isinstance(code, int) else 1)

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
        alive = code is not None and client.stateful
        if alive:
            try:
                self._interpreters.pause(interpreter)
            except OSError:
                alive = False
        if not alive:
            code = self._kill_interpreter(interpreter, code)
        for buffer in (call.stdout, call.stderr):
            buffer.drain()
        state_lost, client.state_lost = client.state_lost, client.stateful and not alive
        outputs = {"stdout": call.stdout.text(), "stderr": call.stderr.text()}
        event = {
            "event": "done",
            "id": call.call_id,
            "end": end,
            "code": code,
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

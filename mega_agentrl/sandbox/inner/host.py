"""The supervisor's loop: serves the launcher's orders with cells. One thread, never blocked
by the policy: it waits only for cells that run none of its code, and then with a deadline.

Protocol. On the main channel (a stateless sandbox's calls, or opening sessions), and on one
channel per session::

    <- {"event": "up"}                                     main, once: warm
    -> {"order": "run", "id": n, "code": str, "timeout_s": float}      main or session
    <- {"event": "started", "id": n}                       from here on the code may have run
    <- {"event": "done", "id": n, "end": "exit" | "timeout" | "cpu" | "cancelled",
        "code": int, "stdout": str, "stderr": str, "num_cut": int, "fresh": bool, "alive": bool}
    -> {"order": "cancel", "id": n}                        nothing where n is not running
    -> {"order": "open"} + channel    <- {"event": "opened"} + pidfd        main
    -> {"order": "fork"} + channel    <- {"event": "forked"}                session, idle
    or, to any of them, {"event": "failed", "error": str}  the code did not run
    -> end of the channel                                  the session is closed

fresh: the state of earlier calls was lost before this one. alive: this call's state is there.
num_cut: output bytes left out, the end of stdout and the beginning of stderr (the last line
of a traceback is the one that matters). A negative code is a signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.inner import processes
from mega_agentrl.sandbox.inner.cells import Cell, CellMaker
from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.output import Kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.sandbox.inner.folders import Hands
    from mega_agentrl.sandbox.inner.settings import Settings

_TICK_S = 0.1
_LOST = (EOFError, OSError, ValueError)


class Call:
    """A call that is running."""

    def __init__(self, seat: Seat, cell: Cell, order: dict[str, Any], limit: int) -> None:
        self.seat = seat
        self.cell = cell
        self.number = order["id"]
        self.deadline = time.monotonic() + float(order["timeout_s"])
        self.begin_cpu_s = processes.cpu_s(cell.pid)
        self.out = Kept(cell.outputs[0], limit, keep_end=False)
        self.err = Kept(cell.outputs[1], limit, keep_end=True)


class Seat:
    """Who has a channel: the launcher itself, or a session, whose state is in `cell`."""

    def __init__(self, channel: Channel, *, keeps: bool) -> None:
        self.channel = channel
        self.keeps = keeps
        self.cell: Cell | None = None
        self.lost = False
        self.call: Call | None = None


class Host:
    """All seats of one sandbox."""

    def __init__(self, settings: Settings, channel: Channel, hands: Hands | None) -> None:
        self._settings = settings
        self._maker = CellMaker(settings, hands)
        self._spare: Cell | None = None
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._calls: set[Call] = set()
        self._main = Seat(channel, keeps=False)
        self._serving = True
        self._sessions: set[Seat] = set()
        self._watch(channel.fileno(), lambda: self._hear(self._main))

    def serve(self) -> None:
        """Until the main channel closes. The first cell's failure is the caller's to see."""
        self._spare = self._maker.birth()
        self._main.channel.send({"event": "up"})
        while self._serving:
            ready = self._poller.poll(self._patience_s() * 1000)
            for fd, _ in ready:
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            for call in tuple(self._calls):
                self._check(call)
            if not ready and self._spare is None:
                with contextlib.suppress(*_LOST):
                    self._spare = self._maker.birth()

    def _patience_s(self) -> float:
        if self._spare is None:
            return 0.0
        now = time.monotonic()
        waits = [max(0.0, min(_TICK_S, call.deadline - now)) for call in self._calls]
        return min(waits, default=3600.0)

    def _watch(self, fd: int, handler: Callable[[], None], event: int = select.POLLIN) -> None:
        self._handlers[fd] = handler
        self._poller.register(fd, event)

    def _forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _hear(self, seat: Seat) -> None:
        try:
            for order in seat.channel.arrived():
                self._obey(seat, order)
        except _LOST:
            self._leave(seat)

    def _obey(self, seat: Seat, order: dict[str, Any]) -> None:
        kind = order["order"]
        if kind == "cancel":
            if seat.call is not None and seat.call.number == order["id"]:
                self._finish(seat.call, "cancelled")
            return
        try:
            if kind == "run":
                self._run(seat, order)
            elif kind == "open":
                self._open(seat)
            else:
                self._fork(seat)
        except _LOST as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            seat.channel.send({"event": "failed", "error": f"{error} {notes}".strip()})

    def _leave(self, seat: Seat) -> None:
        """Its channel has closed."""
        self._forget(seat.channel.fileno())
        if seat.call is not None:
            self._finish(seat.call, "cancelled", silent=True)
        if seat.cell is not None:
            self._release(seat.cell)
            seat.cell = None
        seat.channel.close()
        self._sessions.discard(seat)
        if seat is self._main:
            self._serving = False
            for session in tuple(self._sessions):
                self._leave(session)
            if self._spare is not None:
                self._maker.release(self._spare)

    def _open(self, seat: Seat) -> None:
        session = Seat(self._taken_channel(seat), keeps=True)
        session.cell = self._fresh()
        self._maker.pause(session.cell)
        self._sit(session)
        seat.channel.send({"event": "opened"}, (session.cell.pidfd,))

    def _fork(self, seat: Seat) -> None:
        session = Seat(self._taken_channel(seat), keeps=True)
        try:
            if seat.cell is None:
                session.lost = True
            else:
                session.cell = self._maker.branch(seat.cell)
                self._attend(session.cell)
        except _LOST:
            session.channel.close()
            raise
        self._sit(session)
        seat.channel.send({"event": "forked"})

    def _taken_channel(self, seat: Seat) -> Channel:
        return Channel(socket.socket(fileno=seat.channel.take_fds(1)[0]))

    def _sit(self, session: Seat) -> None:
        self._sessions.add(session)
        self._watch(session.channel.fileno(), lambda: self._hear(session))

    def _fresh(self) -> Cell:
        cell, self._spare = self._spare, None
        if cell is None or cell.is_gone():
            if cell is not None:
                self._maker.release(cell)
            cell = self._maker.birth()
        self._attend(cell)
        return cell

    def _attend(self, cell: Cell) -> None:
        """Answer its filter's questions from now on; the family shares one listener."""
        listener = cell.listener
        if listener is not None and listener.fd not in self._handlers:
            self._watch(listener.fd, listener.answer)

    def _release(self, cell: Cell) -> None:
        listener = cell.listener
        if listener is not None:
            self._forget(listener.fd)
        self._maker.release(cell)
        if listener is not None and listener.users:
            self._watch(listener.fd, listener.answer)

    def _run(self, seat: Seat, order: dict[str, Any]) -> None:
        cell = self._cell_for(seat)
        call = Call(seat, cell, order, self._settings.output_bytes)
        with contextlib.suppress(OSError):  # its end will be seen at its pidfd
            cell.control.post({"order": "run", "code": order["code"]})
        seat.call = call
        self._calls.add(call)
        if seat.keeps:
            self._maker.resume(cell)
        seat.channel.send({"event": "started", "id": call.number})
        self._watch(cell.pidfd, lambda: self._end_of(call))
        for kept in (call.out, call.err):
            self._watch(kept.fd, lambda kept=kept: self._drain(kept))  # type: ignore[misc]
        self._feed(call)

    def _end_of(self, call: Call) -> None:
        if call.cell.is_gone():  # else the news was of an earlier owner of this descriptor
            self._finish(call, "cpu" if self._is_spent(call) else "exit")

    def _is_spent(self, call: Call) -> bool:
        return processes.cpu_s(call.cell.pid) - call.begin_cpu_s > self._settings.cpu_s

    def _cell_for(self, seat: Seat) -> Cell:
        cell = seat.cell
        if cell is not None and cell.is_gone():
            self._release(cell)
            cell, seat.cell, seat.lost = None, None, True
        if cell is None:
            cell = self._fresh()
        elif cell.retired:
            branch = self._maker.branch(cell)
            self._attend(branch)
            self._release(cell)
            cell = branch
        if seat.keeps:
            seat.cell = cell
        return cell

    def _feed(self, call: Call) -> None:
        """Go on writing the code to the cell, then wait for its word."""
        control = call.cell.control
        try:
            done = control.flush()
        except OSError:
            done = True  # its end will be seen at its pidfd
        event = select.POLLIN if done else select.POLLOUT
        handler = (lambda: self._listen(call)) if done else (lambda: self._feed(call))
        self._watch(control.fileno(), handler, event)

    def _drain(self, kept: Kept) -> None:
        if not kept.drain():
            self._forget(kept.fd)

    def _listen(self, call: Call) -> None:
        try:
            words = call.cell.control.arrived()
        except _LOST:
            self._forget(call.cell.control.fileno())  # it closed it, or says nonsense
            return
        if words:
            code = words[0].get("code")
            self._finish(call, "exit", code=code if isinstance(code, int) else 1)

    def _check(self, call: Call) -> None:
        if time.monotonic() >= call.deadline:
            self._finish(call, "timeout")
        elif self._is_spent(call):
            self._finish(call, "cpu")

    def _finish(
        self, call: Call, end: str, *, code: int | None = None, silent: bool = False
    ) -> None:
        """The call is over: by its own word (a code), by its process's end, or by us."""
        seat, cell = call.seat, call.cell
        if call not in self._calls:
            return
        self._calls.discard(call)
        seat.call = None
        for fd in (cell.pidfd, cell.control.fileno(), *cell.outputs):
            self._forget(fd)
        alive = code is not None and seat.keeps
        if alive:
            try:
                self._maker.pause(cell)
            except OSError:
                alive = False
        if not alive:
            code = self._end(cell, code)
        for kept in (call.out, call.err):
            kept.drain()
        fresh, seat.lost = seat.lost, seat.keeps and not alive
        texts = {"stdout": call.out.text(), "stderr": call.err.text()}
        answer = {"event": "done", "id": call.number, "end": end, "code": code, "fresh": fresh}
        answer |= {"alive": alive, "num_cut": call.out.num_cut + call.err.num_cut} | texts
        if not silent:
            with contextlib.suppress(*_LOST):
                seat.channel.send(answer, timeout_s=5.0)
        if not alive:
            seat.cell = None
            self._release(cell)

    def _end(self, cell: Cell, code: int | None) -> int:
        """Kill the cell with all it started; the code it ended with, where it gave none."""
        company = bool(processes.children(cell.pid))
        cell.signal(signal.SIGKILL)
        if code is not None and not company:
            return code
        # Process 1 of a PID namespace goes only after all the others: nobody is left then.
        poller = select.poll()
        poller.register(cell.pidfd, select.POLLIN)
        poller.poll(5000)
        if code is not None:
            return code
        if cell.parent is not None:  # not our child: nobody tells us more
            return -signal.SIGKILL
        info = os.waitid(os.P_PIDFD, cell.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return -signal.SIGKILL
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

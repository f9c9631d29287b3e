"""Makes, forks, stops and ends cells, from the supervisor's side.

**Fork.** A branch must not see or signal the cell it came from, nor the other way round: they
must be in sibling PID namespaces. A process can only make children below itself; so a cell
that is forked is *retired*: it never runs the policy's code again, stays stopped as process 1
of the namespace its branches are nested in, and ends when the last of them and the last
session that could still branch from it are gone. Every user of its state, the session that
held it included, goes on in a branch of its own. PID and user namespaces nest 32 deep.

**Permission.** A cell is filtered and can never make a namespace by itself: the filter turns
every clone with namespace flags into a question to us, and we let through exactly the one we
have ordered (the retired cell's main thread, those flags, once), by the value of a register,
which nobody can change meanwhile. A thread that the policy left running in the cell could at
most make the main thread misuse that permission: it would gain a nested user namespace, in
which mount, setns, unshare and the like are still filtered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.inner import kernel, processes
from mega_agentrl.sandbox.inner.cell import FOLDERS, live
from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.folders import copy_tree

if TYPE_CHECKING:
    from mega_agentrl.sandbox.inner.folders import Hands
    from mega_agentrl.sandbox.inner.settings import Settings

_SETUP_S = 5.0
_MAX_WORD_BYTES = 4096
_FAILURES = (EOFError, OSError, ValueError)


class Cell:
    """One interpreter. `users`: sessions that hold it, and branches made of it."""

    def __init__(self, pid: int, control: Channel, outputs: tuple[int, int], folder: str) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.control = control
        self.outputs = outputs
        self.folder = folder
        self.users = 1
        self.retired = False
        self.parent: Cell | None = None
        self.branches: set[int] = set()
        self.listener: Listener | None = None

    def signal(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def is_gone(self) -> bool:
        """It has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


class Listener:
    """Answers what the filter asks about a family of cells (a first one and its branches)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self._allowed: int | None = None

    def allow(self, pid: int | None) -> None:
        """Let this process make a branch, once; None takes the permission back."""
        self._allowed = pid

    def answer(self) -> None:
        """Answer one question; nothing where there is none, or who asked is gone."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poller.poll(0)):
            return
        buffer = bytearray(kernel.NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(self.fd, kernel.RECEIVE_REQUEST, buffer)
            cookie, pid, number, first = kernel.read_notification(buffer)
            flags = kernel.clone_register(kernel.CELL_FLAGS | kernel.CLONE_NEWNET)
            right = number == kernel.CLONE_NUMBER and first == flags and pid == self._allowed
            if right:
                self._allowed = None
            error = 0 if right else errno.EPERM
            fcntl.ioctl(self.fd, kernel.ANSWER_REQUEST, kernel.answer(cookie, error=error))
        except OSError as gone:
            if gone.errno not in (errno.ENOENT, errno.EINTR):
                raise


class CellMaker:
    """Makes the cells of one sandbox."""

    def __init__(self, settings: Settings, hands: Hands | None) -> None:
        self._settings = settings
        self._hands = hands

    def birth(self) -> Cell:
        """A fresh cell, set up and waiting; raises `OSError`, `EOFError` or `ValueError`."""
        folder = FOLDERS[0] if self._settings.walled else tempfile.mkdtemp(prefix="call-")
        with _Pipes() as pipes:
            pid = self._clone()
            if pid == 0:
                live(pipes.theirs, (pipes.out[1], pipes.err[1]), self._settings, folder)
            cell = Cell(pid, *pipes.take(), folder)
        try:
            cell.control.receive(timeout_s=_SETUP_S)
            if self._settings.stateful and self._settings.walled:
                cell.listener = Listener(cell.control.take_fds(1)[0])
                cell.listener.users = 1
        except _FAILURES as error:
            os.set_blocking(cell.outputs[1], False)
            with contextlib.suppress(BlockingIOError):
                said = os.read(cell.outputs[1], 2000).decode("utf-8", "replace").strip()
                error.add_note(said)
            self.release(cell)
            raise
        return cell

    def branch(self, parent: Cell) -> Cell:
        """A cell that goes on from the parent's state; the parent is retired.

        Raises `OSError`, `EOFError` or `ValueError`; the parent is then as it was, stopped.
        """
        with _Pipes() as pipes:
            pid = self._order_branch(parent, pipes)
            cell = Cell(pid, *pipes.take(), "")
        cell.parent, cell.listener = parent, parent.listener
        parent.users += 1
        parent.branches.add(pid)
        if cell.listener is not None:
            cell.listener.users += 1
        try:
            self._set_up_branch(cell, parent)
        except _FAILURES:
            self.release(cell)
            raise
        parent.retired = True
        return cell

    def release(self, cell: Cell) -> None:
        """One user less; the last one ends it, and its retired ancestors if nobody needs them."""
        cell.users -= 1
        if cell.users > 0:
            return
        if not self._settings.walled:  # no namespace ends what it started
            with contextlib.suppress(TimeoutError):
                self.pause(cell)
            shutil.rmtree(cell.folder, ignore_errors=True)
        cell.signal(signal.SIGKILL)
        if cell.parent is None:
            os.waitpid(cell.pid, 0)
        os.close(cell.pidfd)
        for fd in cell.outputs:
            os.close(fd)
        cell.control.close()
        if cell.listener is not None:
            cell.listener.users -= 1
            if cell.listener.users == 0:
                os.close(cell.listener.fd)
        if cell.parent is not None:
            cell.parent.branches.discard(cell.pid)
            self.release(cell.parent)

    def pause(self, cell: Cell) -> None:
        """Stop it and end what it left running; raises `OSError` (`TimeoutError`)."""
        cell.signal(signal.SIGSTOP)
        processes.wait_until_still(cell.pid)
        left = [pid for pid in processes.children(cell.pid) if processes.state(pid) not in "ZX"]
        if left and self._hands is not None and not cell.branches:
            self._hands.sweep(cell.pid)
            processes.wait_until_alone(cell.pid)
        elif left:
            processes.end_leftovers(cell.pid, spare=cell.branches)

    def resume(self, cell: Cell) -> None:
        """Let it go on."""
        cell.signal(signal.SIGCONT)

    def _clone(self) -> int:
        return (
            kernel.clone(kernel.CELL_FLAGS | self._network())
            if self._settings.walled
            else os.fork()
        )

    def _network(self) -> int:
        return kernel.CLONE_NEWNET if self._settings.stateful else 0

    def _order_branch(self, parent: Cell, pipes: _Pipes) -> int:
        """Have the parent clone itself; the branch's process id. The parent is stopped then."""
        listener = parent.listener
        if listener is not None:
            # What its namespaces may hold together is settled now, from its own limit.
            _limit_processes(parent.pid, None)
            listener.allow(parent.pid)
        try:
            fds = (pipes.out[1], pipes.err[1], pipes.theirs.fileno())
            parent.control.send({"order": "fork"}, fds, timeout_s=_SETUP_S)
            self.resume(parent)
            _wait_for(pipes.control, listener, parent)
            pipes.control.receive(timeout_s=_SETUP_S)
            return pipes.control.peer_pid
        finally:
            if listener is not None:
                listener.allow(None)
                if not parent.branches and not parent.is_gone():
                    _limit_processes(parent.pid, self._settings.num_processes)
            parent.signal(signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                processes.wait_until_still(parent.pid)

    def _set_up_branch(self, cell: Cell, parent: Cell) -> None:
        order = {"order": "go"}
        # What a thread has started meanwhile must not write to files that are being copied.
        processes.end_leftovers(parent.pid, spare=parent.branches)
        if self._hands is not None:
            _check_branch(cell, parent)
            _limit_processes(cell.pid, self._settings.num_processes)
            self._hands.arrange(cell.pid, parent.pid)
        else:
            cell.folder = tempfile.mkdtemp(prefix="call-")
            folders = [os.open(path, os.O_RDONLY) for path in (parent.folder, cell.folder)]
            try:
                copy_tree(*folders)
            finally:
                for fd in folders:
                    os.close(fd)
            order["folder"] = cell.folder
        cell.control.send(order, timeout_s=_SETUP_S)
        cell.control.receive(timeout_s=_SETUP_S)
        self.pause(cell)


class _Pipes:
    """The ends of a new cell's channel and output; closed again, but for what was taken."""

    def __enter__(self) -> _Pipes:
        ours, self.theirs = socket.socketpair()
        self.control = Channel(ours, max_bytes=_MAX_WORD_BYTES, credentials=True)
        self.out = os.pipe()
        self.err = os.pipe()
        self._taken = False
        return self

    def take(self) -> tuple[Channel, tuple[int, int]]:
        """Our ends: the channel, and those of stdout and stderr."""
        self._taken = True
        return self.control, (self.out[0], self.err[0])

    def __exit__(self, *exception: object) -> None:
        self.theirs.close()
        os.close(self.out[1])
        os.close(self.err[1])
        if exception[0] is not None or not self._taken:
            self.control.close()
            os.close(self.out[0])
            os.close(self.err[0])


def _limit_processes(pid: int, number: int | None) -> None:
    """Set how many processes it may have; None: as many as it could have at most."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
    unlimited = hard == resource.RLIM_INFINITY
    soft = hard if number is None else number if unlimited else min(number, hard)
    resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))


def _wait_for(control: Channel, listener: Listener | None, parent: Cell) -> None:
    """Answer the filter's questions until the branch speaks; raises `OSError`."""
    deadline = time.monotonic() + _SETUP_S
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(parent.control, select.POLLIN)
    poller.register(parent.pidfd, select.POLLIN)
    if listener is not None:
        poller.register(listener.fd, select.POLLIN)
    while True:
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        fds = [fd for fd, _ in ready]
        if not fds:
            raise TimeoutError(f"a branch did not start within {_SETUP_S:g} s")
        if control.fileno() in fds:
            return
        if parent.pidfd in fds:
            raise ProcessLookupError("the interpreter ended while it was forked")
        if parent.control.fileno() in fds:
            number = int(parent.control.receive(timeout_s=_SETUP_S).get("errno", 0))
            raise OSError(number, f"clone: {os.strerror(number)}")
        if listener is not None:
            listener.answer()


def _check_branch(cell: Cell, parent: Cell) -> None:
    """Raise `ValueError` unless what spoke is powerless, first of a namespace and a session."""
    with open(f"/proc/{cell.pid}/status", encoding="ascii", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    powers = [int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")]
    spaces = [os.readlink(f"/proc/{one.pid}/ns/pid") for one in (cell, parent)]
    first = fields["NSpid"].split()[-1] == "1" and os.getsid(cell.pid) == cell.pid
    if any(powers) or not first or spaces[0] == spaces[1]:
        raise ValueError("a branch is not what was ordered; the policy's code interfered")

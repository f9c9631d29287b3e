"""Creates, forks, stops and ends interpreters, on the supervisor's side.

**Forking.** A fork and its parent must not see or signal each other, so they must be in sibling PID
namespaces. But a process can only create children below itself. Therefore an interpreter that is
forked is *retired*: it never runs the policy's code again, stays stopped as process 1 of the
namespace in which its forks are nested, and ends when its last fork and the last session that could
still fork it are gone. Every session with its state, also the one that had it first, continues in a
fork of its own. PID and user namespaces nest 32 deep.

**Stopped forks.** Until a fork has been set up it is stopped, and so is its parent, whose other
children are dead. The set-up enters the fork's PID namespace, so the fork must be the only process
in it, have one thread and no capabilities in it: an at-fork handler of the policy's code may have
started a thread before the fork dropped them. Otherwise the fork is refused and killed.

**What is left running.** Processes that a call or a refused fork started are stopped and killed
from outside. If that fails, the interpreter itself is killed, and all below it with it.

**Permission.** The seccomp filter keeps an interpreter from creating a namespace. The kernel asks
the supervisor about every clone with namespace flags, and the supervisor allows only the one that
it has ordered (by the retired interpreter's main thread, with those flags, until it has a child).
It decides by the value of a register, which no thread can change meanwhile, and all other threads
are held until the child exists (`clone_tracer`).

**Limit of processes.** An interpreter's processes and threads are limited by `RLIMIT_NPROC`, which
they cannot change. The kernel counts the processes of nested user namespaces in the outer ones too
and compares each of these counts with the limit that the creator of the next inner namespace had
when it cloned. Nothing can set that maximum later. A fork that is to have its own full number
therefore needs a creator whose limit is higher at the clone. No code of the policy runs under the
higher limit: it is set while the main thread hangs in the clone and the other threads are stopped,
the kernel stops the child before its first instruction, and both limits are back, and read back,
before either continues. If the clone fails, the main thread alone may run until it is stopped, at
most 10 s later; the first process that it creates is stopped at birth like the fork.

A session and its forks together are bounded by `pids.max` of their control group, where there is
one: one interpreter's number and 32 more (`client`), never lifted. Without control groups they are
bounded by 16 times the number.

**No freezer.** A cgroup freezer would add nothing: an interpreter that is stopped between calls has
no other process, and nobody else can continue it, since its forks are in other PID namespaces. A
group can only be frozen while all of its sessions are idle.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.guest import processes, syscalls
from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.guest.clone_tracer import traced_clone
from mega_agentrl.sandbox.guest.interpreter import WRITABLE_FOLDERS, run_interpreter
from mega_agentrl.sandbox.guest.messages import INTERPRETER_EVENTS
from mega_agentrl.sandbox.guest.privileged_helper import copy_tree, set_up_fork

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.messages import MessageTable
    from mega_agentrl.sandbox.guest.settings import GuestSettings

# Each is many times what an idle machine takes. On a busy one every step waits for a CPU.
_SETUP_TIMEOUT_S = 20.0
_FORK_TIMEOUT_S = 30.0
"""Time for a fork without the stopping of processes; the host waits longer than for both."""
_CLONE_TIMEOUT_S = 10.0
"""Time for the ordered clone itself."""
_MAX_EVENT_BYTES = 256
_NUM_FULL_FORKS = 16
"""How many forks of an interpreter may have the full number of processes at once.

An interpreter's limit of processes is raised to so many times the number while it is cloned.
"""

_CAPABILITY_FIELDS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class InterpreterProcess:
    """One interpreter process.

    Attributes:
        ref_count: Number of sessions that hold it and of forks made from it.
    """

    def __init__(self, pid: int, control: Channel, outputs: tuple[int, int], folder: str) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.control = control
        self.output_fds = outputs
        self.folder = folder
        self.ref_count = 1
        self.retired = False
        self.parent: InterpreterProcess | None = None
        self.fork_pids: set[int] = set()
        self.listener: SeccompListener | None = None

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_exited(self) -> bool:
        """Return whether the process has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


RunClone = Callable[[Callable[[], None]], bool]


def _refuse_clone(_: Callable[[], None]) -> bool:
    return False


class SeccompListener:
    """Answers the filter's notifications for one interpreter and all its forks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ref_count = 0
        self._allowed_pid: int | None = None
        self._run_clone: RunClone = _refuse_clone

    def allow_fork(self, pid: int | None, run_clone: RunClone | None = None) -> None:
        """Allow this process one fork; None withdraws the permission.

        Args:
            pid: The process, whose main thread clones.
            run_clone: Calls its argument, which lets the clone continue, and returns whether the
                clone has created a child.
        """
        self._allowed_pid, self._run_clone = pid, run_clone or _refuse_clone

    def respond(self) -> bool:
        """Answer one notification, if there is one and its caller still exists.

        Returns:
            False if every process that has the filter has ended.
        """
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        events = sum(event for _, event in poller.poll(0))
        if not events & select.POLLIN:
            return not events & select.POLLHUP
        buffer = bytearray(syscalls.NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(self.fd, syscalls.SECCOMP_NOTIF_RECV, buffer)
            cookie, pid, number, register = syscalls.unpack_notification(buffer)
            flags = syscalls.clone_flags_register(
                syscalls.INTERPRETER_NAMESPACES | syscalls.CLONE_NEWNET
            )
            ordered = number == syscalls.CLONE_NUMBER and register == flags
            if not ordered or pid != self._allowed_pid:
                self._answer(cookie, errno.EPERM)
            elif self._run_clone(lambda: self._answer(cookie, 0)):
                self.allow_fork(None)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise
        return True

    def _answer(self, cookie: int, error: int) -> None:
        response = syscalls.pack_response(cookie, error=error)
        fcntl.ioctl(self.fd, syscalls.SECCOMP_NOTIF_SEND, response)


class InterpreterManager:
    """Creates and ends the interpreters of one supervisor."""

    def __init__(self, settings: GuestSettings) -> None:
        self._settings = settings

    def check(self) -> None:
        """Start and end an interpreter; raises like `spawn`, or `OSError` without ptrace."""
        interpreter = self.spawn()
        try:
            if self._settings.isolated:
                deadline = time.monotonic() + _CLONE_TIMEOUT_S
                with traced_clone(interpreter.pid, deadline, is_child=True):
                    pass
        finally:
            self.release(interpreter)

    def spawn(self) -> InterpreterProcess:
        """Return a fresh interpreter that waits for orders.

        Raises:
            OSError, EOFError, ValueError: The set-up failed; a note has the interpreter's output.
        """
        folder = (
            WRITABLE_FOLDERS[0] if self._settings.isolated else tempfile.mkdtemp(prefix="call-")
        )
        with InterpreterPipes() as pipes:
            pid = self._clone_process()
            if pid == 0:
                run_interpreter(
                    pipes.peer_socket,
                    (pipes.stdout_pipe[1], pipes.stderr_pipe[1]),
                    self._settings,
                    folder,
                )
            interpreter = InterpreterProcess(pid, *pipes.detach(), folder)
        try:
            receive_event(interpreter.control, "ready")
            if self._settings.stateful and self._settings.isolated:
                interpreter.listener = SeccompListener(interpreter.control.take_fds(1)[0])
                interpreter.listener.ref_count = 1
            interpreter.control.refuse_fds()
        except CONNECTION_ERRORS as error:
            add_output_note(error, interpreter)
            self.release(interpreter)
            raise
        return interpreter

    def fork(self, parent: InterpreterProcess) -> InterpreterProcess:
        """Return an interpreter that continues from the parent's state; the parent is retired.

        Raises:
            OSError, EOFError, ValueError: The fork failed. The parent is stopped and unchanged, or
                killed if processes that it started meanwhile cannot be ended.
        """
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        with InterpreterPipes() as pipes:
            pipes.control.refuse_fds()
            pid = self._request_fork(parent, pipes)
            interpreter = InterpreterProcess(pid, *pipes.detach(), "")
        interpreter.parent, interpreter.listener = parent, parent.listener
        parent.ref_count += 1
        parent.fork_pids.add(pid)
        if interpreter.listener is not None:
            interpreter.listener.ref_count += 1
        try:
            self._set_up_fork(interpreter, parent, deadline)
        except CONNECTION_ERRORS:
            self.release(interpreter)
            self._stop_parent(parent, spare=parent.fork_pids)
            raise
        parent.retired = True
        return interpreter

    def release(self, interpreter: InterpreterProcess) -> None:
        """Drop one reference; the last one ends the process and releases its parent.

        The recursion over retired parents is at most 32 deep.
        """
        interpreter.ref_count -= 1
        if interpreter.ref_count > 0:
            return
        if not self._settings.isolated:  # no namespace ends the processes it started
            with contextlib.suppress(TimeoutError):
                self.pause(interpreter)
            shutil.rmtree(interpreter.folder, ignore_errors=True)
        interpreter.send_signal(signal.SIGKILL)
        if interpreter.parent is None:
            os.waitpid(interpreter.pid, 0)
        os.close(interpreter.pidfd)
        for fd in interpreter.output_fds:
            os.close(fd)
        interpreter.control.close()
        if interpreter.listener is not None:
            interpreter.listener.ref_count -= 1
            if interpreter.listener.ref_count == 0:
                os.close(interpreter.listener.fd)
        if interpreter.parent is not None:
            interpreter.parent.fork_pids.discard(interpreter.pid)
            self.release(interpreter.parent)

    def pause(self, interpreter: InterpreterProcess) -> None:
        """Stop the interpreter and kill the processes it left running.

        Raises:
            OSError: A process cannot be stopped or killed; `TimeoutError` if that takes too long.
        """
        self._stop(interpreter, spare=interpreter.fork_pids)

    def end_call(self, interpreter: InterpreterProcess, *, is_done: bool) -> bool:
        """End what a call has left running; return whether the interpreter keeps its state.

        Args:
            interpreter: The interpreter that ran the call.
            is_done: Whether it has said that the call is done; False after a limit or its end.
        """
        if not is_done:
            return False
        try:
            self.pause(interpreter)
        except OSError:
            return False
        return not interpreter.control.has_unread()  # else it sent more than one event

    def resume(self, interpreter: InterpreterProcess) -> None:
        """Let a stopped interpreter continue."""
        interpreter.send_signal(signal.SIGCONT)

    def _clone_process(self) -> int:
        if not self._settings.isolated:
            return os.fork()
        network_flag = syscalls.CLONE_NEWNET if self._settings.stateful else 0
        return syscalls.clone(syscalls.INTERPRETER_NAMESPACES | network_flag)

    def _request_fork(self, parent: InterpreterProcess, pipes: InterpreterPipes) -> int:
        """Have the parent clone itself and stop both; return the fork's process id."""
        listener = parent.listener
        if listener is not None:
            listener.allow_fork(parent.pid, lambda answer: self._run_clone(parent, answer))
        pid = 0
        try:
            fds = (pipes.stdout_pipe[1], pipes.stderr_pipe[1], pipes.peer_socket.fileno())
            parent.control.send({"order": "fork"}, fds, timeout_s=_SETUP_TIMEOUT_S)
            self.resume(parent)
            _wait_for_fork(pipes.control, listener, parent)
            new_pids = set(processes.child_pids(parent.pid)) - parent.fork_pids
            if pipes.control.peer_pid in new_pids:
                pid = pipes.control.peer_pid
        finally:
            if listener is not None:
                listener.allow_fork(None)
            self._stop_parent(parent, spare={*parent.fork_pids, pid})
        if not pid:
            raise ValueError(_INTERFERENCE)
        return pid

    def _run_clone(self, parent: InterpreterProcess, answer: Callable[[], None]) -> bool:
        """Call `answer`, which lets the clone in which an interpreter's main thread hangs continue.

        The limit of processes is raised only while all other threads are held, and the child is
        held from its birth until its own limit is back.

        Returns:
            Whether a child was created.
        """
        number = self._settings.num_processes
        deadline = time.monotonic() + _CLONE_TIMEOUT_S
        is_child = parent.parent is None
        with traced_clone(parent.pid, deadline, is_child=is_child) as tracer:
            _set_process_limit(parent.pid, _NUM_FULL_FORKS * number)
            try:
                pid = tracer.run_clone(
                    answer, lambda: parent.control.has_unread() or parent.has_exited()
                )
            finally:
                _set_process_limit(parent.pid, number)
            if pid is not None:
                _set_process_limit(pid, number)
        return pid is not None

    def _check_process_limit(self, pid: int) -> None:
        """Raise `ValueError` if a process has a higher limit than an interpreter may have."""
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NPROC)
        if not 0 <= soft <= self._settings.num_processes:
            raise ValueError(f"{_INTERFERENCE}: its limit of processes is {soft}")

    def _stop(self, interpreter: InterpreterProcess, spare: set[int]) -> None:
        """Stop an interpreter and kill its other processes; raises `OSError`."""
        deadline = time.monotonic() + processes.STOP_TIMEOUT_S
        interpreter.send_signal(signal.SIGSTOP)
        processes.wait_until_stopped(interpreter.pid, deadline - time.monotonic())
        left_s = deadline - time.monotonic()
        processes.kill_descendants(interpreter.pid, spare=spare, timeout_s=left_s)

    def _stop_parent(self, parent: InterpreterProcess, spare: set[int]) -> None:
        """Stop an interpreter after a fork and kill its other processes; kill it if that fails."""
        try:
            self._stop(parent, spare=spare)
            if parent.listener is not None and not parent.has_exited():
                self._check_process_limit(parent.pid)
        except (OSError, ValueError):
            parent.send_signal(signal.SIGKILL)
            raise

    def _set_up_fork(
        self, interpreter: InterpreterProcess, parent: InterpreterProcess, deadline: float
    ) -> None:
        interpreter.send_signal(signal.SIGSTOP)
        processes.wait_until_stopped(interpreter.pid)
        if self._settings.isolated:
            _verify_fork(interpreter, parent)
            self._check_process_limit(interpreter.pid)
            set_up_fork(self._settings, interpreter.pid, parent.pid, deadline=deadline)
        else:
            interpreter.folder = tempfile.mkdtemp(prefix="call-")
            folders = [os.open(path, os.O_RDONLY) for path in (parent.folder, interpreter.folder)]
            try:
                copy_tree(*folders)
            finally:
                for fd in folders:
                    os.close(fd)
        self.resume(interpreter)
        order = {"order": "go", "folder": "" if self._settings.isolated else interpreter.folder}
        interpreter.control.send(order, timeout_s=_SETUP_TIMEOUT_S)
        receive_event(interpreter.control, "ready", max(0.0, deadline - time.monotonic()))
        self.pause(interpreter)
        if interpreter.control.has_unread():
            raise ValueError(_INTERFERENCE)


class InterpreterPipes:
    """The pipes and the channel of a new interpreter, closed on exit unless they were detached.

    Args:
        accepts: The events that the interpreter may send.
        max_bytes: Limit of an event.
    """

    def __init__(
        self, accepts: MessageTable = INTERPRETER_EVENTS, max_bytes: int = _MAX_EVENT_BYTES
    ) -> None:
        self._accepts = accepts
        self._max_bytes = max_bytes

    def __enter__(self) -> InterpreterPipes:
        host_end, self.peer_socket = socket.socketpair()
        self.control = Channel(
            host_end,
            accepts=self._accepts,
            max_bytes=self._max_bytes,
            max_fds=1,  # the filter's listener, or the layers of a workspace
            credentials=True,
        )
        self.stdout_pipe = os.pipe()
        self.stderr_pipe = os.pipe()
        self._detached = False
        return self

    def detach(self) -> tuple[Channel, tuple[int, int]]:
        """Return our ends: the channel, and the read ends of stdout and stderr."""
        self._detached = True
        return self.control, (self.stdout_pipe[0], self.stderr_pipe[0])

    def __exit__(self, *exception: object) -> None:
        self.peer_socket.close()
        os.close(self.stdout_pipe[1])
        os.close(self.stderr_pipe[1])
        if exception[0] is not None or not self._detached:
            self.control.close()
            os.close(self.stdout_pipe[0])
            os.close(self.stderr_pipe[0])


def add_output_note(error: Exception, interpreter: InterpreterProcess) -> None:
    """Add what an interpreter that could not be set up has written to stderr to the error."""
    os.set_blocking(interpreter.output_fds[1], False)
    with contextlib.suppress(BlockingIOError):
        text = os.read(interpreter.output_fds[1], 2000).decode("utf-8", "replace")
        error.add_note(text.strip())


def receive_event(
    control: Channel, expected: str, timeout_s: float = _SETUP_TIMEOUT_S
) -> dict[str, Any]:
    """Wait for one event of an interpreter; raises `ValueError` if it is another one."""
    event = control.receive(timeout_s=timeout_s)
    if event["event"] != expected:
        raise ValueError(f"the interpreter sent {event['event']}, expected {expected}")
    return event


def _set_process_limit(pid: int, number: int) -> None:
    """Set a process's soft limit of processes, at most to its hard limit."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
    soft = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))


def _wait_for_fork(
    control: Channel, listener: SeccompListener | None, parent: InterpreterProcess
) -> None:
    """Answer the filter's notifications until the fork has sent its hello; raises `OSError`."""
    deadline = time.monotonic() + _SETUP_TIMEOUT_S
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(parent.control, select.POLLIN)
    poller.register(parent.pidfd, select.POLLIN)
    if listener is not None:
        poller.register(listener.fd, select.POLLIN)
    while True:
        wait_s = deadline - time.monotonic()
        fds = [fd for fd, _ in poller.poll(max(0.0, wait_s) * 1000)]
        if not fds or wait_s < 0:  # notifications may never end
            raise TimeoutError(f"the fork did not start within {_SETUP_TIMEOUT_S:g} s")
        if control.fileno() in fds:
            receive_event(control, "hello", wait_s)
            return
        if parent.pidfd in fds:
            raise ProcessLookupError("the interpreter ended while it was being forked")
        if parent.control.fileno() in fds:
            number = receive_event(parent.control, "refused")["errno"]
            raise OSError(number, f"clone: {os.strerror(number)}")
        if listener is not None:
            listener.respond()


_INTERFERENCE = "the fork is not the process that was ordered; the policy's code interfered"


def _verify_fork(interpreter: InterpreterProcess, parent: InterpreterProcess) -> None:
    """Raise `ValueError` unless a stopped fork is the ordered process and harmless.

    It must lead a PID namespace and a session, be alone in that namespace, and have one thread and
    no capabilities.
    """
    threads = os.listdir(f"/proc/{interpreter.pid}/task")
    status = Path(f"/proc/{interpreter.pid}/status").read_text(encoding="utf-8", errors="replace")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    own_namespace, parent_namespace = (
        os.readlink(f"/proc/{process.pid}/ns/pid") for process in (interpreter, parent)
    )
    is_leader = fields["NSpid"].split()[-1] == "1" and os.getsid(interpreter.pid) == interpreter.pid
    is_alone = len(threads) == 1 and not processes.child_pids(interpreter.pid)
    has_capabilities = any(int(fields[name], 16) for name in _CAPABILITY_FIELDS)
    is_stopped = fields["State"].split()[0] == "T"
    is_valid = is_leader and is_alone and is_stopped and not has_capabilities
    if not is_valid or own_namespace == parent_namespace:
        raise ValueError(_INTERFERENCE)

"""The warm process of a stateful sandbox, which forks one supervisor for each session.

It holds the imported modules. It reads the host's main channel, but nothing that an interpreter
wrote, so that whatever a session's code does to its supervisor ends with that session. The
supervisor owns the session's interpreters and forks (`supervisor`). When it ends, however it ends,
the zygote kills the processes that it has left, which the kernel hands to the zygote.

It starts a session in three steps, so that all processes of the session start in its cgroup::

    -> {"order": "open"} + channel       <- {"event": "opened"} + pidfd of the supervisor
    the host moves the supervisor, which has no children yet, into the cgroup
    -> {"order": "prepare"}              on the session's channel: its first interpreter may start
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from mega_agentrl.sandbox.guest import processes, syscalls
from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.guest.messages import HOST_ORDERS
from mega_agentrl.sandbox.guest.supervisor import Supervisor, make_interpreter_manager

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import GuestSettings

_MAX_FD = 1 << 30


class Zygote:
    """Serves the orders `open` of the main channel."""

    def __init__(self, settings: GuestSettings, channel: Channel) -> None:
        self._settings = settings
        self._channel = channel
        self._supervisor_pids: dict[int, int] = {}
        """Process ids of the sessions' supervisors by their pidfds."""
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)

    def serve(self) -> None:
        """Serve until the main channel closes; raises if the first interpreter does not start."""
        syscalls.adopt_orphans()
        make_interpreter_manager(self._settings).check()
        self._channel.send({"event": "up"})
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._supervisor_pids:
                    self._on_supervisor_exit(fd)
                    continue
                try:
                    orders = self._channel.receive_available()
                except CONNECTION_ERRORS:
                    return
                for order in orders:
                    self._handle_order(order)

    def _on_supervisor_exit(self, pidfd: int) -> None:
        """Kill the processes that a supervisor has left, and collect those that have ended."""
        self._poller.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(self._supervisor_pids.pop(pidfd), 0)
        orphans = set(processes.child_pids(os.getpid())) - {*self._supervisor_pids.values()}
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)

    def _handle_order(self, order: dict[str, Any]) -> None:
        try:
            if order["order"] != "open":
                raise ValueError(f"order {order['order']}, expected open")
            (session_fd,) = self._channel.take_fds(1)
            pid = os.fork()
            if pid == 0:
                self._run_supervisor(session_fd)
            os.close(session_fd)
            pidfd = os.pidfd_open(pid)
        except CONNECTION_ERRORS as error:
            self._channel.send({"event": "failed", "error": str(error)})
            return
        self._supervisor_pids[pidfd] = pid
        self._poller.register(pidfd, select.POLLIN)
        self._channel.send({"event": "opened"}, (pidfd,))

    def _run_supervisor(self, session_fd: int) -> NoReturn:
        code = 1
        try:
            syscalls.die_with_parent()
            os.closerange(3, session_fd)
            os.closerange(session_fd + 1, _MAX_FD)
            channel = Channel(socket.socket(fileno=session_fd), accepts=HOST_ORDERS, max_fds=1)
            Supervisor(self._settings, channel).serve()
            code = 0
        except BaseException:  # noqa: BLE001  the edge of the process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

"""The first process of a workspace: sets up its file systems, then runs its calls.

It is process 1 of the workspace's PID namespace, has no capabilities and is filtered like an
interpreter, but runs no code of the policy, and no process of the workspace can read or trace it.
Nor can they read or trace the editor's. The child that becomes a bash, which they can change before
(`/proc/PID/mem`), has no descriptor of the channel. So the policy's code cannot make up messages.
Process 1 waits for the bash of each call, keeps the state between calls (`shell`), answers which
hard links are made (`links`) and collects the processes that have lost their parent.

Orders, on its control channel::

    -> {"order": "run", "id": int, "kind": str, "code": str}
                                    <- {"event": "done", "id": int, "code": int}
    -> {"order": "interrupt"}       <- {"event": "interrupted"}
    -> {"order": "save"}            <- {"event": "saved", ...}     for a fork

Kinds of a run: "default" is a command for the shell; "clean" is one too, but first ends all other
processes and starts from the state of a new shell, which it does not change, with a new and empty
home folder: so that a command that rates the work cannot be deceived by a process, a function, a
variable or a configuration of the user (`~/.gitconfig`, `~/.local/lib`); "edit" is a request to the
editor (`edit`). `interrupt` ends all other processes; the call has no `done` then. Processes in the
background run on between calls.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.interpreter import (
    apply_limits,
    become_oom_victim,
    leave_supervisor,
)
from mega_agentrl.sandbox.guest.messages import WORKSPACE_ORDERS
from mega_agentrl.sandbox.guest.workspace.edit import EditError, run_edit
from mega_agentrl.sandbox.guest.workspace.layers import WORKSPACE, check_layers, mount_layers
from mega_agentrl.sandbox.guest.workspace.links import LinkListener
from mega_agentrl.sandbox.guest.workspace.shell import (
    MAX_COMMAND_BYTES,
    ShellState,
    initial_state,
    move_to_shell,
    shell_arguments,
)

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import GuestSettings, WorkspaceSettings

_EXIT_NOT_EXECUTABLE = 126
_NO_HOME = "/nonexistent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSource:
    """What a fork starts from."""

    layers_fd: int
    """Descriptor of the layers that are copied (`layers`)."""
    state: str
    """The shell's state."""
    num_background: int
    """Processes that the original has in the background."""


def run_workspace(
    control: socket.socket,
    outputs: tuple[int, int],
    settings: GuestSettings,
    workspace: WorkspaceSettings,
    source: ForkSource | None,
) -> NoReturn:
    """Set up and serve a workspace in a process that was cloned into new namespaces.

    Args:
        control: Channel to the supervisor.
        outputs: Write ends of the pipes for the output and for error messages of the set-up.
        settings: Limits.
        workspace: Layers and limits.
        source: The workspace to continue; None for a new one.
    """
    try:
        fds = [control.detach()] if source is None else [control.detach(), source.layers_fd]
        control_fd, *source_fds = leave_supervisor(outputs, settings, *fds)
        channel = Channel(socket.socket(fileno=control_fd), accepts=WORKSPACE_ORDERS)
        syscalls.map_own_ids()
        syscalls.bring_up_loopback()
        layers_fd = mount_layers(workspace, source_fds[0] if source_fds else None)
        os.chdir(WORKSPACE)
        apply_limits(settings)
        syscalls.drop_capabilities()
        syscalls.install_seccomp_filter(base64.b64decode(settings.seccomp_filter), listener=False)
        links = LinkListener()
        if source is None:
            check_layers(workspace)
        channel.send({"event": "ready"}, (layers_fd,))
        for fd in (layers_fd, *source_fds):
            os.close(fd)
        syscalls.deny_sendmsg()
        syscalls.set_dumpable(False)
        WorkspaceServer(channel, links, workspace, source).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the supervisor is gone
        pass
    except BaseException:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


class WorkspaceServer:
    """Serves the orders of the supervisor, one call at a time."""

    def __init__(
        self,
        channel: Channel,
        links: LinkListener,
        settings: WorkspaceSettings,
        source: ForkSource | None,
    ) -> None:
        self._channel = channel
        self._links = links
        self._initial_state = initial_state(settings.variables, WORKSPACE)
        self._state = ShellState(source.state if source else self._initial_state)
        self._note = ""
        if source is not None and source.num_background:
            self._note = (
                f"[{source.num_background} background processes were not carried over to this "
                "copy of the workspace.]\n"
            )
        self._call_id = 0
        self._call_pid = 0
        self._new_state_fd = -1
        self._keeps_state = False

    def serve(self) -> NoReturn:
        """Serve until the channel closes; raises `EOFError` then."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Process 1 is spared by signals for which it has no handler; Python has one for this.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        poller = select.poll()
        poller.register(wake_r, select.POLLIN)
        poller.register(self._channel, select.POLLIN)
        if self._links.fd >= 0:
            poller.register(self._links.fd, select.POLLIN)
        while True:
            if self._links.fd in dict(poller.poll()):
                self._links.answer()
            with contextlib.suppress(BlockingIOError):
                os.read(wake_r, 1 << 12)
            self._collect_children()
            for order in self._channel.receive_available():
                self._handle(order)

    def _handle(self, order: dict[str, Any]) -> None:
        if order["order"] == "run":
            self._start_call(order["id"], order["kind"], order["code"])
        elif order["order"] == "interrupt":
            self._end_processes()
            self._channel.send({"event": "interrupted"})
        else:
            event = {"state": self._state.text, "num_background": len(_other_pids())}
            self._channel.send({"event": "saved"} | event)

    def _start_call(self, call_id: int, kind: str, code: str) -> None:
        self._call_id = call_id
        if kind == "clean":
            self._end_processes()
        os.set_blocking(1, True)  # the policy's processes share the pipe, and can change that
        _print(self._note)
        self._note = ""
        self._keeps_state = kind == "default"
        state_fd, new_state_fd = self._state_of(kind).write_to_memory()
        pid = self._fork()
        if pid == 0:
            _run_call(kind, code, state_fd, new_state_fd)
        os.close(state_fd)
        if pid < 0:
            os.close(new_state_fd)
            self._send_done(_EXIT_NOT_EXECUTABLE)
        else:
            self._call_pid, self._new_state_fd = pid, new_state_fd

    def _state_of(self, kind: str) -> ShellState:
        """Return the state that a call starts from."""
        if kind == "default":
            return self._state
        home = f"export HOME={_new_home()}\n" if kind == "clean" else ""
        return ShellState(self._initial_state + home)

    def _fork(self) -> int:
        """Fork; return 0 in the child, else its process id, or -1 if there is no room for it."""
        with contextlib.suppress(OSError):
            return os.fork()
        # The processes in the background have reached the limit, or those of a fork the group's.
        self._end_processes()
        _print("[All processes in the background were ended: they left no room for another.]\n")
        with contextlib.suppress(OSError):
            return os.fork()
        _print("[The command did not run: copies of the workspace left no room for a process.]\n")
        return -1

    def _collect_children(self) -> None:
        """Collect all children that have ended; report the call if its process is one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._call_pid:
                self._finish_call(status)

    def _finish_call(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if self._keeps_state:
            self._state.read_from_memory(self._new_state_fd)
        self._forget_call()
        self._send_done(code if code >= 0 else 128 - code)

    def _send_done(self, exit_code: int) -> None:
        self._channel.send({"event": "done", "id": self._call_id, "code": exit_code})

    def _forget_call(self) -> None:
        if self._call_pid:
            os.close(self._new_state_fd)
        self._call_pid, self._new_state_fd = 0, -1

    def _end_processes(self) -> None:
        """Kill all other processes of the workspace, and wait until they have ended."""
        self._forget_call()
        # The kernel signals all processes at once: none can fork meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _new_home() -> str:
    """Return a new, empty home folder, or one that does not exist if there is no room for it."""
    try:
        return tempfile.mkdtemp(prefix="home-", dir="/tmp")
    except OSError:
        return _NO_HOME


def _other_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _run_call(kind: str, code: str, state_fd: int, new_state_fd: int) -> NoReturn:
    """Run a call in a new child process."""
    status = _EXIT_NOT_EXECUTABLE
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last
            signal.signal(number, signal.SIG_DFL)
        _close_descriptors_but(0, 1, 2, state_fd, new_state_fd)
        if kind == "edit":
            status = _run_edit_call(code)
        else:
            syscalls.set_dumpable(True)  # from now on other processes can read and change this one
            become_oom_victim()
            _execute_shell(code, state_fd, new_state_fd)
    except BaseException as error:  # noqa: BLE001  the edge of the process
        _print(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def _close_descriptors_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(int(name))


def _run_edit_call(request_json: str) -> int:
    try:
        answer, status = run_edit(request_json), 0
    except EditError as error:
        answer, status = str(error), 1
    _print(answer)
    return status


def _print(text: str) -> None:
    data = memoryview(text.encode("utf-8", "replace"))
    with contextlib.suppress(BlockingIOError):  # a process of the policy has made the pipe so
        while data:
            data = data[os.write(1, data) :]


def _execute_shell(command: str, state_fd: int, new_state_fd: int) -> None:
    if len(command.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
        _print(f"The command is longer than {MAX_COMMAND_BYTES} bytes; write it to a file.")
        return
    os.dup2(1, 2)
    move_to_shell(state_fd, new_state_fd)
    os.execve(Path("/bin/bash"), shell_arguments(command), {})

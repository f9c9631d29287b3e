"""Creates, forks and ends workspaces, on the supervisor's side.

Unlike an interpreter, a workspace is forked without its help: its state is text and its files are
in layers of which the supervisor holds a descriptor. So the supervisor clones each fork itself, as
a sibling of the original: forks do not nest, and neither ptrace nor notifications of the filter are
needed. The clone copies the files before it gives up its capabilities; no code of the policy runs
in it until then.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS
from mega_agentrl.sandbox.guest.interpreter_manager import (
    InterpreterManager,
    InterpreterPipes,
    InterpreterProcess,
    add_output_note,
    receive_event,
)
from mega_agentrl.sandbox.guest.messages import WORKSPACE_EVENTS
from mega_agentrl.sandbox.guest.workspace.process import ForkSource, run_workspace

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import GuestSettings, WorkspaceSettings

_SETUP_TIMEOUT_S = 30.0
"""Time to mount the layers and to copy those of a fork."""
_REPLY_TIMEOUT_S = 15.0
"""Time for the answer to an order, which may be to end all processes, on a busy machine."""
_MAX_EVENT_BYTES = 1 << 24


class WorkspaceProcess(InterpreterProcess):
    """The first process of a workspace.

    Attributes:
        layers_fd: Descriptor of its layers.
    """

    layers_fd = -1


class WorkspaceManager(InterpreterManager):
    """Creates and ends the workspaces of one supervisor."""

    def __init__(self, settings: GuestSettings, workspace: WorkspaceSettings) -> None:
        super().__init__(settings)
        self._workspace = workspace

    def check(self) -> None:
        """Start, fork and end a workspace; raises like `spawn`."""
        original = self.spawn()
        try:
            self.release(self.fork(original))
        finally:
            self.release(original)

    def spawn(self) -> WorkspaceProcess:
        """Return a new workspace that waits for orders.

        Raises:
            OSError, EOFError, ValueError: The set-up failed; a note has the error's text.
        """
        return self._start(None)

    def fork(self, parent: InterpreterProcess) -> WorkspaceProcess:
        """Return a workspace that continues from the files and the shell state of another.

        Raises:
            OSError, EOFError, ValueError: The fork failed; the parent is unchanged.
        """
        assert isinstance(parent, WorkspaceProcess)
        parent.control.send({"order": "save"}, timeout_s=_REPLY_TIMEOUT_S)
        saved = receive_event(parent.control, "saved", _REPLY_TIMEOUT_S)
        return self._start(
            ForkSource(
                layers_fd=parent.layers_fd,
                state=saved["state"],
                num_background=saved["num_background"],
            )
        )

    def end_call(self, interpreter: InterpreterProcess, *, is_done: bool) -> bool:
        """End all processes of a call that has hit a limit; return whether the workspace is alive.

        After a call that is done, the processes in the background run on, but a workspace that has
        sent more than one event is not trusted any further.
        """
        if is_done:
            return not interpreter.control.has_unread()
        try:
            interpreter.control.send({"order": "interrupt"}, timeout_s=_REPLY_TIMEOUT_S)
            deadline = time.monotonic() + _REPLY_TIMEOUT_S
            event = ""
            while event != "interrupted":  # the call may have ended at the same moment
                wait_s = max(0.0, deadline - time.monotonic())
                event = interpreter.control.receive(timeout_s=wait_s)["event"]
        except CONNECTION_ERRORS:
            return False
        return True

    def pause(self, interpreter: InterpreterProcess) -> None:
        """Do nothing: a workspace runs on between calls."""

    def resume(self, interpreter: InterpreterProcess) -> None:
        """Do nothing: a workspace is never stopped."""

    def release(self, interpreter: InterpreterProcess) -> None:
        """End the workspace."""
        if isinstance(interpreter, WorkspaceProcess) and interpreter.layers_fd >= 0:
            os.close(interpreter.layers_fd)
            interpreter.layers_fd = -1
        super().release(interpreter)

    def _start(self, source: ForkSource | None) -> WorkspaceProcess:
        with InterpreterPipes(WORKSPACE_EVENTS, _MAX_EVENT_BYTES) as pipes:
            pid = self._clone_process()
            if pid == 0:
                outputs = (pipes.stdout_pipe[1], pipes.stderr_pipe[1])
                run_workspace(pipes.peer_socket, outputs, self._settings, self._workspace, source)
            process = WorkspaceProcess(pid, *pipes.detach(), "")
        process.control.expected_pid = pid
        try:
            receive_event(process.control, "ready", _SETUP_TIMEOUT_S)
            (process.layers_fd,) = process.control.take_fds(1)
            process.control.refuse_fds()
        except CONNECTION_ERRORS as error:
            with contextlib.suppress(OSError):
                add_output_note(error, process)
            self.release(process)
            raise
        return process

"""A guest program that starts one command of any language, and forwards ports to Unix sockets.

Its one argument is the number of an inherited descriptor of a file with `LauncherSettings` as JSON:
command lines and environments of running processes can be read by others, files without a name
cannot. It applies the limits and the system call filter, starts the command with its own standard
streams, reports on the status pipe how that went, and ends with the command's exit code, or 128
plus the number of the signal that ended it, as a shell does.

For each forwarded port it listens on 127.0.0.1 and copies each connection's bytes, in both
directions, to and from a new connection to the socket. Every byte is passed on as soon as it is
read, and a side that is closed is closed on the other side. The number of connections is bounded.

Each sandbox pays for its imports, so that `subprocess` and `dataclasses`, which take as long as the
rest of the start, are not among them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from mega_agentrl.sandbox.guest import syscalls

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Sequence
    from types import FrameType

SOCKET_FOLDER = "/sandbox/sockets"
"""Folder with the sockets, each named for its port."""

EXIT_NOT_STARTED = 127

_MIB = 1 << 20
_CHUNK_BYTES = 1 << 16
_NUM_OPEN_FILES = 4096
_MAX_CONNECTIONS = 128
"""Forwarded connections that may be open at once; further ones are closed. Each takes a descriptor
of the process that serves the socket. The gateway runs at most 64 requests of a session at once."""
_BACKLOG = 128


class LauncherSettings(NamedTuple):
    """Settings of a launcher: the command, its environment, ports and limits."""

    command: tuple[str, ...]
    """Program and arguments; a program without a slash is looked up in the variable PATH."""
    environment: dict[str, str]
    """The whole environment of the command, with PATH."""
    working_folder: str
    """Folder that the command starts in."""
    status_fd: int
    """Descriptor of the status pipe: gets an empty line once the command runs, else the error."""
    ports: tuple[int, ...] = ()
    """Forwarded ports."""
    writable: tuple[str, ...] = ()
    """Folders and sockets that must be writable."""
    isolated: bool = True
    """False for trusted code without isolation: no limits, and the group ends with the parent."""
    parent_pid: int = 0
    """Process id of the host's side, if not isolated."""
    seccomp_filter: str = ""
    """The system call filter, base64 of its BPF bytes."""
    memory_mib: int = 0
    """Private writable memory of each process."""
    num_processes: int = 0
    """Processes and threads together."""

    def to_json(self) -> str:
        """Return the content of the settings file."""
        return json.dumps(self._asdict())


def main(settings_fd: str) -> None:
    """Start the command, serve its ports and end as it does; never returns."""
    with open(int(settings_fd), encoding="utf-8") as file:
        settings = LauncherSettings(**json.load(file))
    listeners: list[socket.socket] = []
    os.set_inheritable(settings.status_fd, False)
    with open(settings.status_fd, "w", encoding="utf-8") as status:
        try:
            listeners += [_listen(port) for port in settings.ports]
            _check_writable(settings.writable)
            _set_limits(settings)
            pid = _start_command(settings)
        except OSError as error:
            status.write(json.dumps([error.errno, error.strerror, str(error.filename or "")]))
            status.flush()
            os._exit(EXIT_NOT_STARTED)
        status.write("\n")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # else the command could not close its standard output
        os.dup2(null, stream)
    if listeners:
        import asyncio

        code = asyncio.run(_serve_ports(listeners, pid))
    else:
        code = _wait_for(pid)
    os._exit(code)


def _start_command(settings: LauncherSettings) -> int:
    """Return the process id of the command."""
    os.chdir(settings.working_folder)
    os.environ["PATH"] = settings.environment["PATH"]  # where the program is looked up
    # Python ignores these signals, and the command would inherit that.
    default_signals = [signal.SIGPIPE, signal.SIGXFSZ]
    command = list(settings.command)
    return os.posix_spawnp(command[0], command, settings.environment, setsigdef=default_signals)


def _wait_for(pid: int) -> int:
    """Return the command's exit code, as a shell would."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)


def _check_writable(paths: Sequence[str]) -> None:
    for path in paths:
        if not os.access(path, os.W_OK):
            raise PermissionError(13, f"user {os.getuid()} cannot write to it", path)


def _set_limits(settings: LauncherSettings) -> None:
    """Apply limits and filter, or end this process group with the parent if not isolated."""
    if not settings.isolated:
        signal.signal(signal.SIGTERM, _kill_own_group)
        syscalls.die_with_parent(signal.SIGTERM)
        if os.getppid() != settings.parent_pid:  # it ended before the last line
            _kill_own_group(0, None)
        return
    limits = {
        resource.RLIMIT_DATA: settings.memory_mib * _MIB,
        resource.RLIMIT_NPROC: settings.num_processes,
        resource.RLIMIT_NOFILE: _NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in limits.items():
        syscalls.set_hard_limit(kind, value)
    syscalls.install_seccomp_filter(base64.b64decode(settings.seccomp_filter), listener=False)
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
    ):
        file.write("900")


def _kill_own_group(_signal: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


async def _serve_ports(listeners: Sequence[socket.socket], pid: int) -> int:
    """Forward connections until the command ends; return its exit code."""
    import asyncio

    # Without these references a connection that waits could be garbage-collected.
    connections: set[asyncio.Task[None]] = set()

    def serve(listener: socket.socket) -> Awaitable[asyncio.Server]:
        path = f"{SOCKET_FOLDER}/{listener.getsockname()[1]}"

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(connections) >= _MAX_CONNECTIONS:
                writer.transport.abort()
                return
            task = asyncio.ensure_future(_forward(reader, writer, path))
            connections.add(task)
            task.add_done_callback(connections.discard)

        return asyncio.start_server(accept, sock=listener)

    for listener in listeners:
        await serve(listener)
    return await asyncio.to_thread(_wait_for, pid)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_path: str
) -> None:
    import asyncio

    try:
        up_reader, up_writer = await asyncio.open_unix_connection(socket_path)
    except OSError as error:
        print(f"forwarded port: {socket_path}: {error}", file=sys.stderr, flush=True)
        writer.transport.abort()
        return
    writers = (writer, up_writer)
    try:
        await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer))
    except OSError:
        for end in writers:
            end.transport.abort()
    finally:
        for end in writers:
            end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()

"""Starts a command of any language in a sandbox of its own, with pipes, for asyncio callers.

The command sees `/usr`, the interpreter with its virtual environment at their own paths, the paths
that the caller lists, and a private `/tmp`, `/dev/shm` and process namespace. If the launcher is
root it has its own user id. It has a control group where one can be created, limits on memory,
processes and open files, and the system call filter of the Python sandboxes. Without network it has
only a loopback interface, on which chosen ports lead to Unix sockets of the host.

The environment is never part of a command line, which other users of the host could read. The
command ends with everything it started when it is killed, when its own first process ends, and with
this process.

Example::

    command = SandboxedCommand(command=("node", "server.js"), read_only=(Path("/opt/server"),))
    process = await start(command)
    process.stdin.write(request)
    line = await process.stdout.readline()
    await process.kill()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import NetworkAccess, SandboxIsolation
from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.cgroup import Cgroup, create_cgroup
from mega_agentrl.sandbox.guest.command_launcher import SOCKET_FOLDER, LauncherSettings
from mega_agentrl.sandbox.isolation import (
    BindMount,
    isolated_launcher_command,
    pre_exec_command,
    unisolated_launcher_command,
)
from mega_agentrl.sandbox.process import PIPE, Child, kill_child, start_child
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.sandbox.uid_lease import UidLease, lease_uid

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
"""The variable PATH of a command: the interpreter's folder first, so that `python` is this one."""

MAX_LINE_BYTES = 1 << 20
START_TIMEOUT_S = 30.0
_MAX_STDERR_BYTES = 8192
_NUM_LAUNCHER_PROCESSES = 8
"""Processes and threads of bubblewrap and the launcher."""
_LAUNCHER_MIB = 64
_KILL_TIMEOUT_S = 5.0
_HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"
_PASSWD = b"user:x:1000:1000:user:/tmp:/bin/sh\n"


class CommandStartError(RuntimeError):
    """A command could not be started.

    Attributes:
        program: The program.
        reason: Why not.
    """

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(program, reason)
        self.program = program
        self.reason = reason

    def __str__(self) -> str:
        """Return the message."""
        return f"{self.program} does not start: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxedCommand:
    """A command and what it may use.

    Raises:
        ValueError: The combination is not possible.
    """

    command: tuple[str, ...]
    """Program and arguments. A program without a slash is looked up in the variable PATH."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its environment, beside HOME, LANG and PATH unless they are given."""
    read_only: tuple[Path, ...] = ()
    """Files and folders that it may read, at their own paths."""
    writable: tuple[Path, ...] = ()
    """Folders that it may write to, at their own paths. If root starts the run, other users must be
    permitted to write to them."""
    working_folder: Path = Path("/tmp")
    """Folder that it starts in: `/tmp`, or a path in `read_only` or `writable`."""
    network: NetworkAccess = NetworkAccess.none
    """Its network."""
    forwarded_ports: Mapping[int, Path] = field(default_factory=dict)
    """Unix socket of the host, by TCP port on 127.0.0.1 in the sandbox. If root starts the run,
    other users must be permitted to write to the socket. Only for isolated commands without
    network: elsewhere the ports would be those of the host."""
    isolation: SandboxIsolation = SandboxIsolation.bubblewrap
    """`none` runs trusted code without a sandbox and without limits, in its own process group."""
    memory_limit_mib: int = 2048
    """Private writable memory of each process, and total memory, files in /tmp included, where a
    control group can be created."""
    max_processes: int = 256
    """Processes and threads."""
    tmpfs_mib: int = 256
    """Size of /tmp, and of /dev/shm."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise InputError("command", self.command, "a program and its arguments")
        if self.forwarded_ports and not (self.is_isolated and self.network is NetworkAccess.none):
            expected = f"none with isolation={self.isolation} and network={self.network}"
            cause = "they would be ports of the host"
            raise InputError("forwarded_ports", sorted(self.forwarded_ports), expected, cause)
        for port in self.forwarded_ports:
            if not 1024 <= port < 1 << 16:
                raise InputError("forwarded_ports", port, "1024 to 65535")

    @property
    def is_isolated(self) -> bool:
        """Whether the command runs in a sandbox."""
        return self.isolation is not SandboxIsolation.none


async def start(
    command: SandboxedCommand,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    timeout_s: float = START_TIMEOUT_S,
) -> SandboxedProcess:
    """Start a command and return once it runs.

    Args:
        command: The command.
        max_line_bytes: Length from which `stdout.readline` fails.
        timeout_s: Limit of the start.

    Raises:
        CommandStartError: It does not start, such as a program that does not exist.
        ValueError: bubblewrap is missing, or no user id is free.
    """
    launching = asyncio.get_running_loop().run_in_executor(_executor(), _launch, command)
    try:
        launched = await asyncio.shield(launching)
    except asyncio.CancelledError:
        launching.add_done_callback(_end_abandoned)
        raise
    process = SandboxedProcess(command, launched, max_line_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            await process.connect()
    except TimeoutError as error:
        await process.kill()
        reason = f"it was not up within {timeout_s:g} s{process.stderr_note()}"
        raise CommandStartError(command.command[0], reason) from error
    except BaseException:
        await process.kill()
        raise
    return process


class SandboxedProcess:
    """A running command; `start` makes it."""

    stdin: asyncio.StreamWriter
    """Its standard input; close it to signal the end."""
    stdout: asyncio.StreamReader
    """Its standard output. The command waits while nobody reads it."""

    def __init__(self, command: SandboxedCommand, launched: _Launched, max_line_bytes: int) -> None:
        self._command = command
        self._launched = launched
        self._max_line_bytes = max_line_bytes
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._stderr = _TailProtocol(_MAX_STDERR_BYTES, self._loop)
        self._transports: list[asyncio.BaseTransport] = []
        self._stderr_pipe: asyncio.BaseTransport | None = None
        self._pidfd = os.pidfd_open(launched.child.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def connect(self) -> None:
        """Open the pipes and wait until the command runs; raises `CommandStartError`."""
        child = self._launched.child
        self._launched.has_connected_pipes = True
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self._stderr_pipe, _ = await self._loop.connect_read_pipe(
            lambda: self._stderr, child.stderr
        )
        self.stdout = await self._open_reader(child.stdout, self._max_line_bytes)
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, _ = await self._loop.connect_write_pipe(lambda: protocol, child.stdin)
        self._transports.append(transport)
        self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        status_pipe = os.fdopen(self._launched.take_status_fd(), "rb", 0)
        status = await self._open_reader(status_pipe, MAX_LINE_BYTES)
        answer = await status.read(1) or b"?"
        if answer == b"\n":
            return
        answer += await status.read()
        await self.wait()
        raise CommandStartError(self._command.command[0], self._start_problem(answer))

    @property
    def pid(self) -> int:
        """Process id on the host of the outermost process."""
        return self._launched.child.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or 128 plus the number of a signal; None while the command runs."""
        return self._exit.result() if self._exit.done() else None

    @property
    def num_oom_kills(self) -> int:
        """Number of its processes that were killed for memory; 0 while the command runs."""
        return self._launched.num_oom_kills

    def stderr_tail(self) -> str:
        """Return the end of what the command wrote to its standard error."""
        return self._stderr.text()

    def stderr_note(self) -> str:
        """Return the end of the standard error as the end of a message, empty if it is empty."""
        tail = self.stderr_tail()
        return f"; it wrote: {tail}" if tail else ""

    async def wait(self) -> int:
        """Wait until the command has ended, with everything in its sandbox; return its code."""
        code = await asyncio.shield(self._exit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await asyncio.shield(self._stderr.closed)
        if self._stderr_pipe is not None:  # without isolation a grandchild may keep it open
            self._stderr_pipe.close()
        await self._loop.run_in_executor(_executor(), self._launched.release)
        return code

    async def kill(self) -> None:
        """Kill everything in the sandbox. Safe to call twice."""
        self._launched.kill()
        for transport in self._transports:
            if not transport.is_closing():
                transport.abort() if isinstance(
                    transport, asyncio.WriteTransport
                ) else transport.close()
        await self.wait()

    def kill_now(self) -> None:
        """Kill from synchronous code, also after the event loop has ended. Safe to call twice."""
        self._launched.end()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._launched.kill_group()  # before its leader is reaped
        code = self._launched.child.wait()
        if not self._exit.done():
            self._exit.set_result(code if code >= 0 else 128 - code)

    async def _open_reader(self, pipe: object, limit: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=limit)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_read_pipe(lambda: protocol, pipe)
        self._transports.append(transport)
        return reader

    def _start_problem(self, answer: bytes) -> str:
        program = self._command.command[0]
        try:
            _, reason, name = json.loads(answer)
        except ValueError:
            return f"the sandbox did not start{self.stderr_note()}"
        if name.startswith(f"{SOCKET_FOLDER}/"):
            name = str(self._command.forwarded_ports[int(Path(name).name)])
        if name and name != program:
            return f"{name}: {reason}"
        path = self._command.environment.get("PATH", DEFAULT_PATH)
        return (
            f"{reason}; expected a program in PATH={path}, or a path "
            "below /usr, the Python environment or a folder that is listed as read-only"
        )


class _Launched:
    """The launcher's process and what it uses."""

    def __init__(
        self, child: Child, status_fd: int, cgroup: Cgroup, uid_lease: UidLease | None, group: bool
    ) -> None:
        self.child = child
        self._status_fd = status_fd
        self._cgroup = cgroup
        self._uid_lease = uid_lease
        self._leads_group = group
        self._release_lock = threading.Lock()
        self.has_connected_pipes = False
        """Whether the event loop closes the pipes."""
        self.num_oom_kills = 0
        """Processes that were killed for memory, once the command has been released."""

    def take_status_fd(self) -> int:
        """Return the read end of the status pipe, which the caller closes."""
        descriptor, self._status_fd = self._status_fd, -1
        return descriptor

    def kill(self) -> None:
        """Kill the command with everything it started."""
        self.kill_group()
        if self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.kill()

    def end(self) -> None:
        """Kill the command, wait until it has ended, and release what it used."""
        self.kill()
        kill_child(self.child)
        self.release()

    def kill_group(self) -> None:
        """Kill the process group of a command without isolation."""
        if self._leads_group and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def release(self) -> None:
        """Release control group and user id of a command that has ended.

        Safe to call twice, and from several threads.
        """
        with self._release_lock:
            for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
                if pipe is not None and not self.has_connected_pipes:
                    pipe.close()
            if self._status_fd >= 0:
                os.close(self.take_status_fd())
            self.num_oom_kills = max(self.num_oom_kills, self._cgroup.num_oom_kills)
            self._cgroup.close()
            if self._uid_lease is not None:
                self._uid_lease.close()


class _TailProtocol(asyncio.Protocol):
    """Keeps the end of what a pipe carries."""

    def __init__(self, max_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self._max_bytes = max_bytes
        self._tail = b""
        self.closed: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-self._max_bytes :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def text(self) -> str:
        """Return the end as text, without surrounding white space."""
        return self._tail.decode("utf-8", "replace").strip()


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="sandbox-command")


def _end_abandoned(launching: asyncio.Future[_Launched]) -> None:
    if not launching.cancelled() and launching.exception() is None:
        _executor().submit(launching.result().end)  # in a thread, because it may wait


def _launch(command: SandboxedCommand) -> _Launched:
    """Start the launcher; raises `CommandStartError` or `ValueError`."""
    for path in (*command.read_only, *command.writable, *command.forwarded_ports.values()):
        if command.is_isolated and not path.exists():
            raise CommandStartError(command.command[0], f"there is no {path}")
    uid_lease = lease_uid() if command.is_isolated else None
    cgroup = Cgroup([])
    status_fd, child_status_fd = os.pipe()
    descriptors = [child_status_fd]
    try:
        if command.is_isolated:
            cgroup = create_cgroup(
                memory_mib=command.memory_limit_mib + _LAUNCHER_MIB,
                num_processes=command.max_processes + _NUM_LAUNCHER_PROCESSES,
            )
        files = {"/etc/passwd": _memory_file(_PASSWD), "/etc/hosts": _memory_file(_HOSTS)}
        descriptors += files.values()
        settings = _launcher_settings(command, child_status_fd)
        settings_fd = _memory_file(settings.to_json().encode())
        descriptors.append(settings_fd)
        words = unisolated_launcher_command(settings_fd)
        if command.is_isolated:
            words = pre_exec_command(
                _isolated_command(command, settings_fd, files),
                user=None if uid_lease is None else uid_lease.uid,
                cgroups=cgroup.procs_files,
            )
        child = start_child(
            words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=descriptors,
            new_group=not command.is_isolated,
        )
    except BaseException as error:
        os.close(status_fd)
        cgroup.close()
        if uid_lease is not None:
            uid_lease.close()
        if isinstance(error, OSError):
            raise CommandStartError(command.command[0], str(error)) from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return _Launched(child, status_fd, cgroup, uid_lease, group=not command.is_isolated)


def _launcher_settings(command: SandboxedCommand, status_fd: int) -> LauncherSettings:
    defaults = {"PATH": DEFAULT_PATH, "HOME": "/tmp", "LANG": "C.UTF-8"}
    sockets = [f"{SOCKET_FOLDER}/{port}" for port in command.forwarded_ports]
    return LauncherSettings(
        command=command.command,
        environment={**defaults, **command.environment},
        working_folder=str(command.working_folder),
        status_fd=status_fd,
        ports=tuple(command.forwarded_ports),
        writable=(*map(str, command.writable), *sockets),
        isolated=command.is_isolated,
        parent_pid=os.getpid(),
        seccomp_filter=seccomp_filter_base64(stateful=False) if command.is_isolated else "",
        memory_mib=command.memory_limit_mib,
        num_processes=command.max_processes + _NUM_LAUNCHER_PROCESSES,
    )


def _isolated_command(
    command: SandboxedCommand, settings_fd: int, files: dict[str, int]
) -> list[str]:
    # At its own paths as well, because the first lines of its programs name them.
    environment = dict.fromkeys([Path(sys.prefix), Path(sys.prefix).resolve()])
    mounts = [BindMount(source=path, target=path) for path in (*environment, *command.read_only)]
    mounts += [BindMount(source=path, target=path, is_writable=True) for path in command.writable]
    mounts += [
        BindMount(source=path, target=Path(SOCKET_FOLDER, str(port)), is_writable=True)
        for port, path in command.forwarded_ports.items()
    ]
    shares_network = command.network is NetworkAccess.host
    if shares_network:
        files = {name: number for name, number in files.items() if name != "/etc/hosts"}
    return isolated_launcher_command(
        settings_fd,
        mounts=mounts,
        files=files,
        shares_network=shares_network,
        tmpfs_mib=command.tmpfs_mib,
    )


def _memory_file(content: bytes) -> int:
    """Return a descriptor of a new file without a name."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

"""The program inside the wall: a warm Python that runs each call in a fork of itself.

Runs alone (standard library only, no package of ours is visible inside). It imports what is
asked for once, then serves one call at a time. A call is a fork in user, mount, PID and IPC
namespaces of its own, with an empty tmpfs as working folder, no capability and resource
limits: it starts from the same state as every other call, and when it ends, by itself or at
its deadline, the kernel ends everything it started.

Protocol, frames of a 4-byte big-endian length and JSON, over the socket on descriptor 0::

    <- {"event": "ready"}
    -> {"code": str, "timeout_s": float}
    <- {"event": "started"}                         from here on the code may have run
    <- {"event": "done", "end": "exit" | "timeout" | "processes", "code": int,
        "stdout": str, "stderr": str, "num_cut": int}
    or {"event": "failed", "error": str}            the code did not run

`num_cut` counts the output bytes left out: the end of stdout, the beginning of stderr (the
last line of a traceback is the one that matters). A negative `code` is a signal.

RLIMIT_NPROC does not bind while the launcher's uid is 0: processes are counted as well.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from dataclasses import asdict, dataclass
from typing import Any

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID_NODEV = 0x2 | 0x4
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x20080522
_TICK_S = 0.05
_LENGTH = struct.Struct(">I")
_MIB = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(kw_only=True)
class Settings:
    """Limits of each call. `preload`: modules imported before the first call.

    memory_mib: address space beyond what the warm interpreter has, per process.
    output_bytes: kept of stdout and of stderr. file_mib: of its tmpfs.
    """

    preload: tuple[str, ...] = ()
    memory_mib: int = 512
    output_bytes: int = 16384
    num_processes: int = 64
    num_files: int = 256
    file_mib: int = 64

    def to_json(self) -> str:
        """The program's argument."""
        return json.dumps(asdict(self))


def send_frame(channel: socket.socket, message: dict[str, Any]) -> None:
    """Write one frame; raises `OSError` when the peer is gone or past the socket's timeout."""
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(channel: socket.socket) -> dict[str, Any]:
    """Read one frame; raises `EOFError` when the peer has gone, `TimeoutError` as set."""
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size))
    message: dict[str, Any] = json.loads(_receive_exactly(channel, length))
    return message


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        part = channel.recv(min(num_bytes, 1 << 16))
        if not part:
            raise EOFError("the peer closed the channel")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def main(settings: Settings) -> None:
    """Serve calls until the channel closes."""
    _enter_own_pids()
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what imports print is no answer
    for name in settings.preload:
        importlib.import_module(name)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    gc.collect()
    gc.freeze()  # keeps the collector from copying every page in each fork
    send_frame(channel, {"event": "ready"})
    while True:
        try:
            call = receive_frame(channel)
        except EOFError:
            return
        send_frame(channel, {"event": "started"})
        send_frame(channel, _serve(call, settings, own_pids))


def _enter_own_pids() -> None:
    """Go on as process 1 of a PID namespace owned by a user namespace of our own.

    Making PID namespaces, and coming back, takes CAP_SYS_ADMIN in the owner of the current
    one, which bubblewrap's need not give us. The process left behind waits and passes the
    exit code on.
    """
    _new_user_namespace(_CLONE_NEWPID)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os._exit(min(255, abs(os.waitstatus_to_exitcode(status))))


def _new_user_namespace(flags: int) -> None:
    """Unshare a user namespace and `flags`; user and group keep their numbers."""
    uid, gid = os.getuid(), os.getgid()
    _checked(libc.unshare(_CLONE_NEWUSER | flags), "unshare namespaces")
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
    for name, text in maps:
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _serve(call: dict[str, Any], settings: Settings, own_pids: int) -> dict[str, Any]:
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    ready_r, ready_w = os.pipe()
    try:
        try:
            pid = _fork_into_namespace(own_pids)
        except OSError as error:
            return {"event": "failed", "error": str(error)}
        if pid == 0:
            _child(call, settings, out_w, err_w, ready_w)
        for fd in (out_w, err_w, ready_w):
            os.close(fd)
        out_w = err_w = ready_w = -1
        out = _Kept(out_r, settings.output_bytes, keep_end=False)
        err = _Kept(err_r, settings.output_bytes, keep_end=True)
        end, code = _watch(pid, (out, err), float(call["timeout_s"]), settings)
        if end == "exit" and os.read(ready_r, 1) != b"1":
            return {"event": "failed", "error": f"call set-up: {err.text().strip()}"}
    finally:
        for fd in (out_r, out_w, err_r, err_w, ready_r, ready_w):
            if fd >= 0:
                os.close(fd)
    texts = {"stdout": out.text(), "stderr": err.text()}
    return {"event": "done", "end": end, "code": code, "num_cut": out.num_cut + err.num_cut} | texts


def _fork_into_namespace(own_pids: int) -> int:
    """Fork a child that is process 1 of a new PID namespace; it takes all its kin with it."""
    _checked(libc.unshare(_CLONE_NEWPID), "unshare PID namespace")
    try:
        pid = os.fork()
    except OSError:
        _checked(libc.setns(own_pids, _CLONE_NEWPID), "return to own PID namespace")
        raise
    if pid:
        _checked(libc.setns(own_pids, _CLONE_NEWPID), "return to own PID namespace")
    return pid


class _Kept:
    """What is kept of one output pipe, whose reading end it drains."""

    def __init__(self, fd: int, limit: int, *, keep_end: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.num_cut = 0
        self._limit = limit
        self._keep_end = keep_end
        self._data = bytearray()

    def drain(self, *, num_bytes: int) -> bool:
        """Read what is there, at most about `num_bytes`; False at the end of the pipe."""
        while num_bytes > 0:
            try:
                part = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            num_bytes -= len(part)
            self._data += part
            extra = len(self._data) - self._limit
            if extra > 0:
                self.num_cut += extra
                kept = self._data[extra:] if self._keep_end else self._data[: self._limit]
                self._data = kept
        return True

    def text(self) -> str:
        """The kept bytes as text."""
        return self._data.decode("utf-8", "replace")


def _watch(
    pid: int, outputs: tuple[_Kept, ...], timeout_s: float, settings: Settings
) -> tuple[str, int]:
    """Wait for the call's end, drain its output, kill it at a limit."""
    deadline = time.monotonic() + timeout_s
    end = "exit"
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    open_outputs = {output.fd: output for output in outputs}
    for fd in open_outputs:
        poller.register(fd, select.POLLIN)
    try:
        running = True
        while running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                end = "timeout"
            elif _num_processes() > settings.num_processes:
                end = "processes"
            if end != "exit":
                os.kill(pid, signal.SIGKILL)
                break
            for fd, _ in poller.poll(max(1, int(min(left_s, _TICK_S) * 1000))):
                if fd == pidfd:
                    running = False
                elif not open_outputs[fd].drain(num_bytes=_MIB):
                    poller.unregister(fd)
    finally:
        os.close(pidfd)
    # Process 1 of a PID namespace is collected only after all the others: nobody writes now.
    _, status = os.waitpid(pid, 0)
    for output in outputs:
        output.drain(num_bytes=_MIB)
    return end, os.waitstatus_to_exitcode(status)


def _num_processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def _child(call: dict[str, Any], settings: Settings, out: int, err: int, ready: int) -> None:
    """Everything the forked process does; never returns."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(ready, 3)
        os.setsid()
        _enter_namespaces(settings)
        _limit(settings, float(call["timeout_s"]))
        _drop_capabilities()
        os.write(3, b"1")
        os.closerange(3, settings.num_files + 16)
        code = _execute(call["code"])
    except BaseException:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter_namespaces(settings: Settings) -> None:
    _new_user_namespace(_CLONE_NEWNS | _CLONE_NEWIPC)
    options = f"size={settings.file_mib}m,nr_inodes=4096,mode=0700".encode()
    for folder in (b"/tmp", b"/dev/shm"):
        status = libc.mount(b"tmpfs", folder, b"tmpfs", _MS_NOSUID_NODEV, options)
        _checked(status, f"mount {folder.decode()}")
    os.chdir("/tmp")


def _limit(settings: Settings, timeout_s: float) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        warm = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = (
        (resource.RLIMIT_AS, warm + settings.memory_mib * _MIB),
        (resource.RLIMIT_CPU, int(timeout_s) + 2),
        (resource.RLIMIT_FSIZE, settings.file_mib * _MIB),
        (resource.RLIMIT_NOFILE, settings.num_files),
        (resource.RLIMIT_NPROC, settings.num_processes),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, value in limits:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_capabilities() -> None:
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")


def _checked(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _execute(code: str) -> int:
    """Run `code` as `python -c` would; its exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # the standard library reseeds itself after a fork, numpy does not
    status = _run_in(module, code)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120  # what Python itself answers when it cannot flush
    return status


def _run_in(module: types.ModuleType, code: str) -> int:
    try:
        exec(compile(code, "<string>", "exec"), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  whatever the policy wrote
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))

"""Messages between launcher, supervisor and cells: JSON frames over a stream socket.

A frame is a 4-byte big-endian length and that many bytes of JSON. Descriptors may travel
with a frame. The peer's process id, as the kernel saw it, comes with what it sent where
`SO_PASSCRED` was asked for; the peer cannot forge it. The peer may be hostile: a frame longer
than the reader's bound, one that is no JSON object, or more descriptors than anybody waits
for raise `ValueError`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
_MAX_FDS = 8
_READ_BYTES = 1 << 16


class Channel:
    """One end. Used by one thread at a time in each direction.

    max_bytes: of a frame to be read. credentials: fill `peer_pid`.
    """

    def __init__(
        self, end: socket.socket, *, max_bytes: int = 1 << 26, credentials: bool = False
    ) -> None:
        end.setblocking(False)
        if credentials:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = end
        self._max_bytes = max_bytes
        self._read = bytearray()
        self._write = bytearray()
        self._fds: list[int] = []
        self.peer_pid = 0

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and descriptors nobody took; safe twice."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def shutdown(self) -> None:
        """Unblock whoever waits at either end; raises `OSError` when it is gone already."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def take_fds(self, count: int) -> list[int]:
        """The first `count` descriptors that came; raises `ValueError` for too few."""
        if len(self._fds) < count:
            raise ValueError(f"{len(self._fds)} descriptors came, expected {count}")
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def send(
        self, message: dict[str, Any], fds: tuple[int, ...] = (), *, timeout_s: float | None = None
    ) -> None:
        """Write one frame; raises `OSError` (`TimeoutError` past the deadline)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        frame = memoryview(_frame(message))
        while frame:
            try:
                sent = socket.send_fds(self._socket, [frame], list(fds))
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            frame, fds = frame[sent:], ()

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Read one frame; raises `EOFError`, `OSError`, `TimeoutError`, `ValueError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._next()
            if message is not None:
                return message
            if not self._fill():
                self._wait(select.POLLIN, deadline)

    def arrived(self) -> list[dict[str, Any]]:
        """The frames that are there, without waiting; raises as `receive` does."""
        messages = []
        more = True
        while more:
            more = self._fill()
            message = self._next()
            while message is not None:
                messages.append(message)
                message = self._next()
        return messages

    def post(self, message: dict[str, Any]) -> None:
        """Queue one frame and write what the socket takes; raises `OSError`."""
        self._write += _frame(message)
        self.flush()

    def flush(self) -> bool:
        """Write what the socket takes; True when nothing is left. Raises `OSError`."""
        while self._write:
            try:
                del self._write[: self._socket.send(self._write)]
            except BlockingIOError:
                return False
        return True

    def _next(self) -> dict[str, Any] | None:
        if len(self._read) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._read)
        if length > self._max_bytes:
            raise ValueError(f"frame of {length} bytes, expected at most {self._max_bytes}")
        end = _LENGTH.size + length
        if len(self._read) < end:
            return None
        try:
            message = json.loads(self._read[_LENGTH.size : end])
        except RecursionError as error:
            raise ValueError("frame nested too deeply") from error
        del self._read[:end]
        if not isinstance(message, dict):
            raise ValueError(f"frame of {type(message).__name__}, expected an object")  # noqa: TRY004
        return message

    def _fill(self) -> bool:
        space = socket.CMSG_SPACE(_MAX_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, extra, _, _ = self._socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) // 4 * 4
                self._fds += [fd for (fd,) in struct.iter_unpack("i", content[:whole])]
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.peer_pid = _CREDENTIALS.unpack(content)[0]
        if not data:
            raise EOFError("the peer closed the channel")
        if len(self._fds) > _MAX_FDS:
            while self._fds:
                os.close(self._fds.pop())
            raise ValueError(f"descriptors that nobody asked for, expected at most {_MAX_FDS}")
        self._read += data
        return True

    def _wait(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left_ms):
            raise TimeoutError("the peer did not answer in time")


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body

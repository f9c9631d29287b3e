"""Messages between host, supervisor and interpreters: JSON frames over a stream socket.

A frame is a 4-byte big-endian length and that many bytes of JSON. File descriptors may travel with
a frame. Where `SO_PASSCRED` is set, the kernel adds the sender's process id, which the sender
cannot forge. The peer may be hostile: a frame longer than the reader's limit, one that is not a
JSON object or not in the reader's table of messages (`messages`), or more descriptors than the
reader accepts raise `ValueError`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.guest.messages import FrameError

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.messages import MessageTable

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
_FD_BYTES = 4
_READ_CHUNK_BYTES = 1 << 16
_MAX_READS_PER_TURN = 16
_MAX_WAIT_S = 3600.0

CONNECTION_ERRORS = (EOFError, OSError, ValueError)
"""Errors of sending and receiving if the peer is gone or sends an invalid frame."""


class Channel:
    """One end of a channel, used by one thread at a time in each direction.

    Args:
        stream_socket: The connected socket.
        accepts: The messages that the peer may send; None accepts any object.
        max_bytes: Limit of a received frame.
        max_fds: Limit of received descriptors that nobody has taken yet.
        credentials: Whether to fill `peer_pid`.
    """

    def __init__(
        self,
        stream_socket: socket.socket,
        *,
        accepts: MessageTable | None = None,
        max_bytes: int = 1 << 26,
        max_fds: int = 0,
        credentials: bool = False,
    ) -> None:
        stream_socket.setblocking(False)
        if credentials:
            stream_socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = stream_socket
        self._accepts = accepts
        self._max_bytes = max_bytes
        self._max_fds = max_fds
        self._read_buffer = bytearray()
        self._write_buffer = bytearray()
        self._fds: list[int] = []
        self.peer_pid = 0
        self.expected_pid: int | None = None
        """The only process whose frames are accepted, if `credentials` is set; None for any."""

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken. Safe to call twice."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def shutdown(self) -> None:
        """End all waits at either end; raises `OSError` if the channel is already closed."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def take_fds(self, count: int) -> list[int]:
        """Return the first `count` received descriptors; raises `FrameError` if there are fewer."""
        if len(self._fds) < count:
            raise FrameError(f"{len(self._fds)} descriptors", f"{count}")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return fds

    def refuse_fds(self) -> None:
        """Accept no further descriptors."""
        self._max_fds = 0

    def send(
        self, message: dict[str, Any], fds: tuple[int, ...] = (), *, timeout_s: float | None = None
    ) -> None:
        """Write one frame.

        Raises:
            OSError: The channel is broken; `TimeoutError` after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        frame = memoryview(_encode_frame(message))
        while frame:
            try:
                # Python's `send_fds` needs `socket.sendmsg`, which guests hide (`hide_sendmsg`).
                sent = self._send_with_fds(frame, fds) if fds else self._socket.send(frame)
            except BlockingIOError:
                self._wait_ready(select.POLLOUT, deadline)
                continue
            frame, fds = frame[sent:], ()

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for one frame and return it.

        Raises:
            EOFError: The peer closed the channel.
            OSError: The channel is broken; `TimeoutError` after `timeout_s`.
            ValueError: The frame is invalid.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._pop_message()
            if message is not None:
                return message
            if not self._read_available():
                self._wait_ready(select.POLLIN, deadline)

    def receive_available(self) -> list[dict[str, Any]]:
        """Return frames that have arrived, without waiting; raises like `receive`.

        Reads at most 16 times 64 KiB, so that a peer that never stops sending cannot hold the
        caller; the rest is left to the next call.
        """
        messages = []
        for _ in range(_MAX_READS_PER_TURN):
            more = self._read_available()
            message = self._pop_message()
            while message is not None:
                messages.append(message)
                message = self._pop_message()
            if not more:
                break
        return messages

    def has_unread(self) -> bool:
        """Return whether the peer has sent anything that was not returned, or closed its end."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(self._read_buffer) or bool(poller.poll(0))

    def send_nowait(self, message: dict[str, Any]) -> None:
        """Queue one frame and write what the socket accepts; raises `OSError`."""
        self._write_buffer += _encode_frame(message)
        self.flush()

    def flush(self) -> bool:
        """Write what the socket accepts; return True if nothing is left. Raises `OSError`."""
        while self._write_buffer:
            try:
                del self._write_buffer[: self._socket.send(self._write_buffer)]
            except BlockingIOError:
                return False
        return True

    def _pop_message(self) -> dict[str, Any] | None:
        if len(self._read_buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._read_buffer)
        if length > self._max_bytes:
            raise FrameError(f"a frame of {length} bytes", f"at most {self._max_bytes}")
        frame_end = _LENGTH.size + length
        if len(self._read_buffer) < frame_end:
            return None
        try:
            message = json.loads(self._read_buffer[_LENGTH.size : frame_end])
        except RecursionError as error:
            raise FrameError("a frame that is nested too deeply", "a flat object") from error
        del self._read_buffer[:frame_end]
        if not isinstance(message, dict):
            raise FrameError(f"a frame of {type(message).__name__}", "an object")
        if self._accepts is not None:
            self._accepts.check(message)
        return message

    def _send_with_fds(self, frame: memoryview, fds: tuple[int, ...]) -> int:
        content = struct.pack(f"{len(fds)}i", *fds)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, content)]
        return socket.SocketType.sendmsg(self._socket, [frame], rights)

    def _read_available(self) -> bool:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        if self._max_fds:
            space += socket.CMSG_SPACE(self._max_fds * _FD_BYTES)
        try:
            data, extra, flags, _ = self._socket.recvmsg(
                _READ_CHUNK_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                num_bytes = len(content) // _FD_BYTES * _FD_BYTES
                self._fds += [fd for (fd,) in struct.iter_unpack("i", content[:num_bytes])]
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.peer_pid = _CREDENTIALS.unpack(content)[0]
        if not data:
            raise EOFError("the peer closed the channel")
        if self.expected_pid not in (None, self.peer_pid):
            raise FrameError(f"a frame of process {self.peer_pid}", f"{self.expected_pid}")
        if len(self._fds) > self._max_fds or flags & socket.MSG_CTRUNC:
            while self._fds:
                os.close(self._fds.pop())
            raise FrameError("more descriptors", f"at most {self._max_fds}")
        self._read_buffer += data
        return True

    def _wait_ready(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        wait_s = _MAX_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
        if not poller.poll(min(wait_s, _MAX_WAIT_S) * 1000) and wait_s < _MAX_WAIT_S:
            raise TimeoutError("the peer did not answer in time")


def _encode_frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body

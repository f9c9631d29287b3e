"""A size-limited buffer for the output of a call."""

from __future__ import annotations

import os

MAX_DRAIN_BYTES = 1 << 20
"""At most this much is read before other events are served."""


class OutputBuffer:
    """The first or the last bytes that come through a pipe.

    Args:
        fd: the pipe's read end.
        max_bytes: how many bytes to keep.
        keep_end: whether to keep the last bytes instead of the first.
    """

    def __init__(self, fd: int, max_bytes: int, *, keep_end: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.num_dropped_bytes = 0
        self._max_bytes = max_bytes
        self._keep_end = keep_end
        self._data = bytearray()

    def drain(self, *, num_bytes: int = MAX_DRAIN_BYTES) -> bool:
        """Read what is available, at most about `num_bytes`; return False at the pipe's end."""
        while num_bytes > 0:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            num_bytes -= len(chunk)
            self._data += chunk
            num_extra = len(self._data) - self._max_bytes
            if num_extra > 0:
                self.num_dropped_bytes += num_extra
                self._data = (
                    self._data[num_extra:] if self._keep_end else self._data[: self._max_bytes]
                )
        return True

    def text(self) -> str:
        """Return the buffered bytes as text."""
        return self._data.decode("utf-8", "replace")

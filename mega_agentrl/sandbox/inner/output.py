"""What is kept of the output of a call."""

from __future__ import annotations

import os

DRAIN_BYTES = 1 << 20
"""At most this much is read before other things get their turn."""


class Kept:
    """The beginning, or the end, of what comes through a pipe whose reading end it drains."""

    def __init__(self, fd: int, limit: int, *, keep_end: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.num_cut = 0
        self._limit = limit
        self._keep_end = keep_end
        self._data = bytearray()

    def drain(self, *, num_bytes: int = DRAIN_BYTES) -> bool:
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
                self._data = self._data[extra:] if self._keep_end else self._data[: self._limit]
        return True

    def text(self) -> str:
        """The kept bytes as text."""
        return self._data.decode("utf-8", "replace")

"""Shows the driver's warnings on the terminal; `logs/driver.log` has all of them."""

from __future__ import annotations

import logging
import sys
import time

REPEAT_EVERY_S = 60.0
"""Seconds in which a warning with the same template is shown once."""

_MAX_CHARS = 300


class TerminalWarnings(logging.Handler):
    """Prints each kind of warning on one line of standard error, without tracebacks.

    Warnings with the same template, such as one per trajectory, are one kind. A kind is shown
    at most once in `REPEAT_EVERY_S`, with the number of warnings that were left out since.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown_s: dict[tuple[str, str], float] = {}
        self._num_omitted: dict[tuple[str, str], int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message, unless one of its kind was printed a moment ago."""
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        if kind in self._shown_s and now_s - self._shown_s[kind] < REPEAT_EVERY_S:
            self._num_omitted[kind] = self._num_omitted.get(kind, 0) + 1
            return
        self._shown_s[kind] = now_s
        text = " ".join(record.getMessage().split())[:_MAX_CHARS]
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f": {type(error).__name__}: {error}"[:_MAX_CHARS]
        if num_omitted := self._num_omitted.pop(kind, 0):
            text += f" ({num_omitted} more like this since the last one)"
        # Looked up here, because a live progress bar replaces it.
        print(f"{record.levelname.lower()}: {text}", file=sys.stderr)

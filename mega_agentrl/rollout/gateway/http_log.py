"""Bounds what clients can make the gateway write to the log."""

from __future__ import annotations

import logging
from typing import Any

MAX_LINES = 20
"""Requests that cannot be read, and errors of the gateway, that are logged each. The first ones
tell what is wrong, and the rest are counted."""

_MAX_CHARS = 200


class HttpLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of the HTTP library: one line for each of the first requests that it cannot read.

    Args:
        logger: Writes the lines.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self.num_unreadable = 0
        self.num_failed = 0

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log a request that cannot be read."""
        self.num_unreadable += 1
        if self.num_unreadable <= MAX_LINES:
            cause = str(exc_info).partition("\n")[0] if isinstance(exc_info, Exception) else msg
            self.logger.warning("a client sent no HTTP: %.*s", _MAX_CHARS, cause)

    def log_failure(self, place: str) -> None:
        """Log the exception that is being handled, an error of the gateway itself."""
        self.num_failed += 1
        if self.num_failed <= MAX_LINES:
            self.logger.exception("%.*s failed", _MAX_CHARS, place)

    def report_rest(self) -> None:
        """Log how many lines were left out; at the end of the run."""
        counts = {"requests that were no HTTP": self.num_unreadable, "errors": self.num_failed}
        for name, count in counts.items():
            if count > MAX_LINES:
                self.logger.warning("the gateway had %d %s, %d are shown", count, name, MAX_LINES)

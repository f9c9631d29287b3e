"""The report page of a run that ends before its end: stopped, put back into the queue, or failed.

Comes last, when the run is saved, its processes are ended and its error is told: who stops a run
may kill it soon after. It is given up after `STOPPED_S` or `FAILED_S`, by an alarm of the main
thread. Nothing is raised, not even at Ctrl-C, so that the run's own error and exit code stay what
they were: where there is no page, or only the one that was there, a line in `logs/driver.log` says
why.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mega_agentrl.train.run_report import write_report

STOPPED_S = 5.0
"""Seconds for the page after a signal; who sends TERM mostly sends KILL 30 s later."""

FAILED_S = 60.0
"""Seconds for the page of a run that nobody waits for."""

_logger = logging.getLogger(__name__)


class _TooLate(BaseException):
    """The time for the page is over; nothing that makes the page may catch it."""


def write_last_page(run_dir: Path, *, deadline_s: float) -> bool:
    """Write the page of the folder as it is; whether it was. deadline_s: until it is given up."""
    try:
        with _alarm(deadline_s):
            write_report(run_dir)
    except _TooLate:
        _logger.warning("no report page: it was not written within %g s", deadline_s)
    except KeyboardInterrupt:
        _logger.warning("no report page: interrupted while it was written")
    except Exception:
        _logger.exception("no report page")
    else:
        return True
    return False


@contextmanager
def _alarm(deadline_s: float) -> Iterator[None]:
    """Raises `_TooLate` in the body; without any bound outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _TooLate

"""The report page of a run that is stopped, requeued or has failed.

It is written last, after the run is saved, its processes have ended and its error is printed,
because whoever stops a run may kill it soon after. An alarm in the main thread stops it after
`INTERRUPTED_TIMEOUT_S` or `FAILED_TIMEOUT_S`. Nothing is raised, not even at Ctrl-C, so that the
run's own error and exit code stay as they are. If no page was written, a line in `logs/driver.log`
says why.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mega_agentrl.train.output.report_page import write_report

INTERRUPTED_TIMEOUT_S = 5.0
"""Seconds for the page after a signal; after TERM mostly KILL follows 30 s later."""

FAILED_TIMEOUT_S = 60.0
"""Seconds for the page of a failed run, which nobody waits for."""

_logger = logging.getLogger(__name__)


class _ReportTimeout(BaseException):
    """The time limit is over. A `BaseException`, so that the report code does not catch it."""


def write_interrupted_report(run_dir: Path, *, deadline_s: float) -> bool:
    """Write the page within `deadline_s`; return whether it was written."""
    try:
        with _time_limit(deadline_s):
            write_report(run_dir)
    except _ReportTimeout:
        _logger.warning("no report page: it was not written within %g s", deadline_s)
    except KeyboardInterrupt:
        _logger.warning("no report page: interrupted while it was written")
    except Exception:
        _logger.exception("no report page")
    else:
        return True
    return False


@contextmanager
def _time_limit(deadline_s: float) -> Iterator[None]:
    """Raise `_ReportTimeout` in the body after `deadline_s`; no limit outside the main thread."""
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
    raise _ReportTimeout

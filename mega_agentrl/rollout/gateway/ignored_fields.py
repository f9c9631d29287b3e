"""Counts the fields of requests that have no effect: one line per run and field, and a metric."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_AFTER = 64
"""Requests of a run after which a field is reported with its share; the end of the run is another
time."""
MAX_FIELDS = 100
"""Fields that are told apart, since clients may make up names."""

_log = logging.getLogger(__name__)


class RequestCounts:
    """Counts requests, and those that had a field without effect."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_ignored: Counter[str] = Counter()
        """Requests by field."""

    def record(self, ignored: Mapping[str, str]) -> None:
        """Count a request; `ignored` has the reasons by field."""
        self.num_requests += 1
        for name in ignored:
            if name in self.num_ignored or len(self.num_ignored) < MAX_FIELDS:
                self.num_ignored[name] += 1


class IgnoredFields(RequestCounts):
    """The requests of a run; reports each field without effect once."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[str, str] = {}
        self._first_requests: dict[str, int] = {}
        """Number of the first request with a field that has not been reported yet."""

    def record(self, ignored: Mapping[str, str]) -> None:
        """Count a request, and report the fields that are due."""
        super().record(ignored)
        for name, reason in ignored.items():
            if name in self.num_ignored and name not in self._reasons:
                self._reasons[name] = reason
                self._first_requests[name] = self.num_requests
        due = [
            name
            for name, first in self._first_requests.items()
            if self.num_requests >= first + REPORT_AFTER
        ]
        self._report(due)

    def report_rest(self) -> None:
        """Report the fields that have not been reported; at the end of the run."""
        self._report(list(self._first_requests))

    def _report(self, names: list[str]) -> None:
        for name in names:
            del self._first_requests[name]
            _log.warning(
                "the agent's requests have the field %s (%d of %d so far), which has no effect: %s",
                name,
                self.num_ignored[name],
                self.num_requests,
                self._reasons[name],
            )

"""The order in which pages are parsed: no site can keep the pages of others waiting.

The pages of a site whose last page took long wait until no other is waiting. Otherwise that site is
next whose last turn is the longest ago. Sites with a page that could not be parsed within the
limits may, for a while, not use all workers together: one remains for the others.

A site is what the last two labels of a host name stand for, since who has a domain may invent any
number of names within it, or an address.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW_PAGE_S = 0.5
"""Processor time of a page that took long; a usual page takes 0.1 s."""

REFUSAL_EFFECT_S = 60.0
"""Time for which a site with a refused page leaves a worker to others. A site can so take the last
worker for one page a minute."""

MAX_SITES = 1000
"""Sites whose last pages are remembered; those that were parsed first are forgotten."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ParsedPage:
    """The result of the parsing of a page."""

    text: str
    """Its text, or why it was refused."""
    cpu_s: float
    """Processor time that it took."""
    is_refused: bool


@dataclass(slots=True)
class _Site:
    """The last page of a site, and until when it is held back."""

    last_turn: int = 0
    """Number of the turn of its last page."""
    last_cpu_s: float = 0.0
    refused_until_s: float = 0.0


@dataclass(slots=True, frozen=True)
class _Waiting:
    """A page that waits for a worker."""

    site: str
    number: int
    parse: Callable[[], Future[ParsedPage]]
    future: Future[ParsedPage] = field(default_factory=Future)


class ParseQueue:
    """Starts the parsing of pages, as many at a time as there are workers; safe in any thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.RLock()
        self._waiting: list[_Waiting] = []
        self._running: list[str] = []
        """Sites of the pages that are being parsed."""
        self._sites: OrderedDict[str, _Site] = OrderedDict()
        self._num_pages = self._num_turns = 0

    def submit(self, host: str, parse: Callable[[], Future[ParsedPage]]) -> Future[ParsedPage]:
        """Return the result of a page, which can be cancelled until its parsing begins.

        Args:
            host: Host of the page.
            parse: Starts the parsing in a worker.
        """
        with self._lock:
            self._num_pages += 1
            page = _Waiting(site_of(host), self._num_pages, parse)
            self._waiting.append(page)
            self._start_pages()
        return page.future

    def _start_pages(self) -> None:
        while self._waiting and len(self._running) < self._num_workers:
            self._waiting = [page for page in self._waiting if not page.future.cancelled()]
            allowed = [page for page in self._waiting if self._has_worker(page.site)]
            if not allowed:
                return
            page = min(allowed, key=self._rank)
            self._waiting.remove(page)
            if page.future.set_running_or_notify_cancel():
                self._start(page)

    def _start(self, page: _Waiting) -> None:
        self._num_turns += 1
        self._site(page.site).last_turn = self._num_turns
        self._running.append(page.site)
        try:
            parsing = page.parse()
        except Exception as error:  # noqa: BLE001  raised to the caller
            self._running.remove(page.site)
            page.future.set_exception(error)
            return
        parsing.add_done_callback(lambda done: self._on_parsed(page, done))

    def _on_parsed(self, page: _Waiting, parsing: Future[ParsedPage]) -> None:
        error = parsing.exception()
        with self._lock:
            self._running.remove(page.site)
            site = self._site(page.site)
            if error is None:
                site.last_cpu_s = parsing.result().cpu_s
            if error is not None or parsing.result().is_refused:
                site.refused_until_s = time.monotonic() + REFUSAL_EFFECT_S
            self._start_pages()
        if error is None:
            page.future.set_result(parsing.result())
        else:
            page.future.set_exception(error)

    def _has_worker(self, name: str) -> bool:
        """Return whether a page of a site may have one of the free workers."""
        if not self._is_refused(name) or self._num_workers == 1:
            return True
        return sum(map(self._is_refused, self._running)) < self._num_workers - 1

    def _is_refused(self, name: str) -> bool:
        site = self._sites.get(name)
        return site is not None and time.monotonic() < site.refused_until_s

    def _rank(self, page: _Waiting) -> tuple[bool, int, int]:
        site = self._sites.get(page.site, _Site())
        return site.last_cpu_s >= SLOW_PAGE_S, site.last_turn, page.number

    def _site(self, name: str) -> _Site:
        site = self._sites.setdefault(name, _Site())
        self._sites.move_to_end(name)
        if len(self._sites) > MAX_SITES:
            self._sites.popitem(last=False)
        return site


def site_of(host: str) -> str:
    """Return the site of a host: the last two labels of a name, or the whole address."""
    labels = host.rstrip(".").split(".")
    is_address = ":" in host or labels[-1].isdigit()
    return host if is_address else ".".join(labels[-2:]).lower()

"""The text of a page: HTML is parsed in child processes, under limits of time and memory.

A parser's time is not bounded by the size of its input: 1 MiB of tags that are never closed takes
minutes, and a thread cannot be stopped. Each page is therefore parsed in a fork of a worker, which
ends when its processor time is used up, and the page is refused. `parse_queue` says in which order
the workers, which start with the first HTML page, take the pages.

The text of an HTML page is trafilatura's main text, or all its text if there is none or the page
has too many tags for the time. Plain text, JSON and similar formats are used as they are.
"""

from __future__ import annotations

import asyncio
import codecs
import resource
import threading
from base64 import b64decode, b64encode
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import httpx

from mega_agentrl.sandbox.limited_fork import ForkError, ForkTimeError, call_in_fork
from mega_agentrl.sandbox.worker_pool import (
    FunctionFailedError,
    WorkerLostError,
    WorkerPool,
    WorkerTimeoutError,
    make_worker_call,
)
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.tool.browse.parse_queue import ParsedPage, ParseQueue
from mega_agentrl.tool.browse.url_rules import PageRefusedError, RefusalReason

if TYPE_CHECKING:
    from mega_agentrl.tool.browse.page_fetcher import Page

MAX_TEXT_CHARS = 1_000_000
"""Maximum length of a page's text."""
MAX_CPU_S = 1.5
"""Processor time for the parsing of a page: three times that of a page of 2 MiB, all its text, and
of the main text of a page of `MAX_MAIN_TEXT_TAGS` tags."""
MAX_MAIN_TEXT_TAGS = 20_000
"""Tags of a page, opening and closing ones, up to which its main text is looked for. The search
takes 25 to 50 us a tag, ten times as long as taking all text; pages of documentation and long
articles have some thousand tags."""
MAX_PARSE_S = 10.0
"""Maximum duration of the parsing of a page, on a machine whose processors are all busy."""
MAX_PARSE_BYTES = 2 << 30
"""Address space of a parsing process."""

_NUM_WORKERS = 2
_HTML_MEDIA_TYPES = ("text/html", "application/xhtml+xml")
_WORKER_FUNCTION = "mega_agentrl.tool.browse.page_text:parse_in_worker"
_WEB_CODECS = frozenset(
    codecs.lookup(name).name
    for name in (
        *("ascii", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "koi8-r", "koi8-u", "mac-roman"),
        *(f"iso8859-{number}" for number in range(1, 17) if number != 12),
        *(f"cp{number}" for number in (866, 874, *range(1250, 1259))),
        *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "euc-jp", "iso2022-jp", "shift-jis"),
        *("cp932", "euc-kr", "cp949"),
    )
)
"""Character sets of web pages. Python has more codecs, such as punycode and unicode-escape, whose
time or errors a server could choose."""
_WARM_UP_PAGES = (
    "<html><body><p>short</p></body></html>",
    "<html><body><nav><a href='/'>x</a></nav><article><h1>x</h1>"
    + f"<p>{'A sentence. ' * 40}</p>" * 4
    + "<ul><li>x</ul><table><tr><td>x</table><pre>x</pre></article><div>x</div></body></html>",
)
"""Pages whose parsing imports and compiles what usual pages need: 0.2 s that no fork spends."""
_TOO_COMPLEX = f"The page is too complex: it was not parsed within {MAX_CPU_S:g} s."
_DAMAGED = "The page is damaged or too complex: it could not be parsed."


class PageTextExtractor:
    """Extracts the text of pages; call `close` at the end."""

    def __init__(self) -> None:
        warm_up = make_worker_call(f"{__name__}:{warm_up_worker.__name__}", {})
        self._pool = WorkerPool(_NUM_WORKERS, MAX_PARSE_S, warm_up=[warm_up])
        self._queue = ParseQueue(_NUM_WORKERS)
        self._lock = threading.Lock()
        self._is_started = False

    async def extract(self, page: Page) -> str:
        """Return the text of a page, at most `MAX_TEXT_CHARS`; empty if it has none.

        Raises:
            PageRefusedError: The page cannot be parsed within the limits.
            RuntimeError: The workers cannot be started, or were closed.
        """
        if page.media_type not in _HTML_MEDIA_TYPES:
            source = decode_body(page.body, page.charset)
            text = source if isinstance(source, str) else source.decode("utf-8", "replace")
            return text.strip()[:MAX_TEXT_CHARS]
        await call_in_thread(self._start_once)
        arguments = {"body": b64encode(page.body).decode("ascii"), "charset": page.charset}
        host = httpx.URL(page.url_chain[-1]).host
        parsed = self._queue.submit(host, lambda: self._parse(arguments))
        found = await asyncio.wrap_future(parsed)
        if found.is_refused:
            raise PageRefusedError(RefusalReason.content, found.text)
        return found.text

    def close(self) -> None:
        """End the workers; pages in progress fail. Safe to call twice."""
        self._pool.close()

    def _start_once(self) -> None:
        with self._lock:
            if not self._is_started:
                self._pool.start()
                self._is_started = True

    def _parse(self, arguments: dict[str, str]) -> Future[ParsedPage]:
        """Start the parsing of a page in a worker."""
        parsed: Future[ParsedPage] = Future()
        answer = self._pool.submit(_WORKER_FUNCTION, arguments)
        answer.add_done_callback(lambda done: _set_result(parsed, done))
        return parsed


def _set_result(parsed: Future[ParsedPage], answer: Future[dict[str, Any]]) -> None:
    """Pass the answer of a worker on; what a page does to its worker is a refusal."""
    try:
        found = ParsedPage(**answer.result())
    except WorkerTimeoutError:
        found = ParsedPage(text=_TOO_COMPLEX, cpu_s=MAX_CPU_S, is_refused=True)
    except (FunctionFailedError, WorkerLostError) as error:
        if isinstance(error, WorkerLostError) and not error.may_have_run:
            parsed.set_exception(error)
            return
        found = ParsedPage(text=_DAMAGED, cpu_s=MAX_CPU_S, is_refused=True)
    except RuntimeError as error:  # the pool was closed
        parsed.set_exception(error)
        return
    parsed.set_result(found)


def parse_in_worker(body: str, charset: str) -> dict[str, Any]:
    """Parse an HTML page in a fork of the worker; returns the fields of a `ParsedPage`.

    Args:
        body: The page's bytes in base 64.
        charset: What the server declares, or empty.
    """
    started_s = _forks_cpu_s()
    try:
        text = call_in_fork(
            lambda: parse_html(b64decode(body), charset).encode("utf-8", "replace"),
            cpu_s=MAX_CPU_S,
            num_bytes=MAX_PARSE_BYTES,
        )
    except ForkError as error:
        reason = _TOO_COMPLEX if isinstance(error, ForkTimeError) else _DAMAGED
        return asdict(ParsedPage(text=reason, cpu_s=_forks_cpu_s() - started_s, is_refused=True))
    cpu_s = _forks_cpu_s() - started_s
    return asdict(ParsedPage(text=text.decode(), cpu_s=cpu_s, is_refused=False))


def warm_up_worker() -> None:
    """Prepare a worker, so that its forks find everything imported and compiled."""
    for page in _WARM_UP_PAGES:
        parse_html(page.encode(), "")


def parse_html(body: bytes, charset: str) -> str:
    """Return the text of an HTML page; `charset` is empty if the server declares none."""
    import trafilatura  # takes long, and is needed in the workers alone

    source = decode_body(body, charset)
    text = None
    if body.count(b"<") <= MAX_MAIN_TEXT_TAGS:
        text = trafilatura.extract(source, include_comments=False, include_tables=True)
    return str(text or trafilatura.html2txt(source) or "").strip()[:MAX_TEXT_CHARS]


def _forks_cpu_s() -> float:
    """Return the processor time of all forks that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def decode_body(body: bytes, charset: str) -> str | bytes:
    """Decode by the declared charset; return the bytes if it is unknown or wrong."""
    try:
        is_known = codecs.lookup(charset).name in _WEB_CODECS
        return body.decode(charset) if is_known else body
    except (LookupError, ValueError):  # the name is unknown, or the bytes are invalid
        return body

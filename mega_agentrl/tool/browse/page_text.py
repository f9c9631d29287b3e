"""The text of a page: HTML is parsed in child processes, under limits of time and memory.

A parser's time is not bounded by the size of its input: 1 MiB of tags that are never closed takes
minutes, and a thread cannot be stopped. A page that misses its deadline is refused, and its
worker is killed and replaced. The workers start with the first HTML page.

The text of an HTML page is trafilatura's main text, or all its text if there is none. Plain text,
JSON and similar formats are used as they are.
"""

from __future__ import annotations

import asyncio
import codecs
import resource
import threading
from base64 import b64decode, b64encode
from functools import cache
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.worker_pool import (
    FunctionFailedError,
    WorkerLostError,
    WorkerPool,
    WorkerTimeoutError,
    make_worker_call,
)
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.tool.browse.url_rules import PageRefusedError, RefusalReason

if TYPE_CHECKING:
    from mega_agentrl.tool.browse.page_fetcher import Page

MAX_TEXT_CHARS = 1_000_000
"""Maximum length of a page's text."""
MAX_PARSE_S = 10.0
"""Maximum duration of the parsing of a page."""
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


class PageTextExtractor:
    """Extracts the text of pages; call `close` at the end.

    Args:
        timeout_s: Maximum duration of the parsing of a page.
    """

    def __init__(self, timeout_s: float = MAX_PARSE_S) -> None:
        self._timeout_s = timeout_s
        warm_up = make_worker_call(_WORKER_FUNCTION, {"body": "", "charset": ""})
        self._pool = WorkerPool(_NUM_WORKERS, timeout_s, warm_up=[warm_up])
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
        try:
            answer = self._pool.submit(_WORKER_FUNCTION, arguments)
            return str(await asyncio.wrap_future(answer))
        except WorkerTimeoutError as error:
            message = f"The page is too complex: it was not parsed within {self._timeout_s:g} s."
            raise PageRefusedError(RefusalReason.content, message) from error
        except (FunctionFailedError, WorkerLostError) as error:
            if isinstance(error, WorkerLostError) and not error.may_have_run:
                raise
            message = "The page is damaged or too complex: it could not be parsed."
            raise PageRefusedError(RefusalReason.content, message) from error

    def close(self) -> None:
        """End the workers; pages in progress fail. Safe to call twice."""
        self._pool.close()

    def _start_once(self) -> None:
        with self._lock:
            if not self._is_started:
                self._pool.start()
                self._is_started = True


def parse_in_worker(body: str, charset: str) -> str:
    """Return the text of an HTML page, whose bytes are given in base 64; runs in a worker."""
    _limit_memory()
    return parse_html(b64decode(body), charset)


def parse_html(body: bytes, charset: str) -> str:
    """Return the text of an HTML page; `charset` is empty if the server declares none."""
    import trafilatura  # needed in the workers alone

    source = decode_body(body, charset)
    text = trafilatura.extract(source, include_comments=False, include_tables=True)
    return str(text or trafilatura.html2txt(source) or "").strip()[:MAX_TEXT_CHARS]


@cache
def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_PARSE_BYTES, MAX_PARSE_BYTES))


def decode_body(body: bytes, charset: str) -> str | bytes:
    """Decode by the declared charset; return the bytes if it is unknown or wrong."""
    try:
        is_known = codecs.lookup(charset).name in _WEB_CODECS
        return body.decode(charset) if is_known else body
    except (LookupError, ValueError):  # the name is unknown, or the bytes are invalid
        return body

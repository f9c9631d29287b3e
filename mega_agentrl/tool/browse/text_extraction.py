"""Extracts the text of a page: trafilatura's main text, or all text if it finds none.

Plain text, JSON and similar formats are used as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trafilatura

if TYPE_CHECKING:
    from mega_agentrl.tool.browse.page_fetcher import Page

MAX_TEXT_CHARS = 1_000_000

_HTML_MEDIA_TYPES = ("text/html", "application/xhtml+xml")


def extract_page_text(page: Page) -> str:
    """Return the text of a page, at most `MAX_TEXT_CHARS`; empty if it has none."""
    source = _decode_body(page)
    if page.media_type not in _HTML_MEDIA_TYPES:
        return str(source if isinstance(source, str) else _decode_utf8(source)).strip()[
            :MAX_TEXT_CHARS
        ]
    text = trafilatura.extract(source, include_comments=False, include_tables=True)
    text = text or trafilatura.html2txt(source)
    return str(text or "").strip()[:MAX_TEXT_CHARS]


def _decode_body(page: Page) -> str | bytes:
    """Decode by the declared charset; return the bytes if there is none or it is wrong."""
    try:
        return page.body.decode(page.charset) if page.charset else page.body
    except (LookupError, UnicodeDecodeError):
        return page.body


def _decode_utf8(body: bytes) -> str:
    return body.decode("utf-8", "replace")

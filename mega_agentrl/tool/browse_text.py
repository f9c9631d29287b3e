"""The text of a page: trafilatura's main text, all of its text where that finds nothing.

Pages of plain text, JSON and the like are taken as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trafilatura

if TYPE_CHECKING:
    from mega_agentrl.tool.browse_fetch import Page

MAX_TEXT_CHARS = 1_000_000

_HTML = ("text/html", "application/xhtml+xml")


def page_text(page: Page) -> str:
    """Text of a page, at most `MAX_TEXT_CHARS`; empty where it has none."""
    source = _decoded(page)
    if page.media_type not in _HTML:
        return str(source if isinstance(source, str) else _plain(source)).strip()[:MAX_TEXT_CHARS]
    text = trafilatura.extract(source, include_comments=False, include_tables=True)
    text = text or trafilatura.html2txt(source)
    return str(text or "").strip()[:MAX_TEXT_CHARS]


def _decoded(page: Page) -> str | bytes:
    """By the declared charset; bytes, for a guess, where there is none or it is wrong."""
    try:
        return page.body.decode(page.charset) if page.charset else page.body
    except (LookupError, UnicodeDecodeError):
        return page.body


def _plain(body: bytes) -> str:
    return body.decode("utf-8", "replace")

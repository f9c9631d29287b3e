"""The text of a page, and the limits of its parsing."""

import asyncio
import os

import pytest

from mega_agentrl.sandbox.worker_pool import WorkerCallError
from mega_agentrl.tool.browse import page_text
from mega_agentrl.tool.browse.page_fetcher import Page
from mega_agentrl.tool.browse.page_text import (
    MAX_TEXT_CHARS,
    PageTextExtractor,
    decode_body,
    parse_html,
)
from mega_agentrl.tool.browse.url_rules import PageRefusedError

ARTICLE = """<html><head><title>T</title><script>evil()</script><style>p {{}}</style></head><body>
<nav><a href="/">Home</a><a href="/x">Menu</a></nav>
<article><h1>Otters</h1><p>{0}</p><p>They sleep holding hands in the water, all of them.</p>
</article>
<footer>Imprint</footer></body></html>"""


UMLAUTS = "Füchse und Bären sind scheu und leben im Wald. " * 8


def make_page(body, media_type="text/html", charset=""):
    return Page(url_chain=("http://x/",), media_type=media_type, charset=charset, body=body)


async def extract(*pages):
    """Return the text of each page, or the error."""
    extractor = PageTextExtractor()
    try:
        return await asyncio.gather(*map(extractor.extract, pages), return_exceptions=True)
    finally:
        extractor.close()


def test_the_main_text_is_shown_without_menus_and_scripts():
    article = ARTICLE.format("Otters eat many clams and fish every day. " * 8)
    shown = parse_html(article.encode(), "")
    assert "holding hands" in shown and "evil()" not in shown and "Menu" not in shown
    # A page without a main text gives what it has.
    assert "tiny" in parse_html(b"<html><body><div><span>tiny</span></div></body></html>", "")


def test_a_page_is_decoded_by_its_charset_or_a_guess():
    article = ARTICLE.format(UMLAUTS)
    for charset in ("utf-8", "latin-1", "utf-16"):
        assert "Bären" in parse_html(article.encode(charset), charset)
    for charset in ("no-such-charset", "", "ascii"):
        assert "Bären" in parse_html(article.encode(), charset)


ODD_CHARSETS = (
    *("idna", "punycode", "utf-7", "unicode_escape", "raw_unicode_escape", "undefined", "zlib"),
    *("hex", "base64", "bz2", "rot13", "uu", "quopri", "mbcs", "utf-8-sig", "aliases", "a\0b"),
    *("\ud800", "\u00fc", "x" * 10_000, "..", "os", "../../x", "utf-32"),
)


@pytest.mark.parametrize("body", [b"", b"a-b", b"\xff\xfe\x80", b"+AGE-", b"xn--a", b"\\x41"])
def test_odd_charsets_leave_the_bytes(body):
    for charset in ODD_CHARSETS:
        assert decode_body(body, charset) == body


async def test_plain_kinds_are_taken_as_they_are():
    found = await extract(
        make_page(b" <b>x</b> \n", "text/plain"),
        make_page(b'{"a": 1}', "application/json", "utf-8"),
        make_page(b"\xff", "text/plain"),
        make_page(b"\xff", "text/plain", "idna"),
        make_page(b"x " * MAX_TEXT_CHARS, "text/plain"),
    )
    assert found[:4] == ["<b>x</b>", '{"a": 1}', "\ufffd", "\ufffd"]
    assert len(found[4]) == MAX_TEXT_CHARS


def test_a_page_without_text_is_empty():
    for body in (b"", b"   ", b"<html></html>", b"\0\0", b"<!-- -->"):
        assert parse_html(body, "").strip("\0") == ""


SLOW_PAGES = {
    "nested": b"<html><body>" + (b"<div>" * 200 + b"x" + b"</div>" * 200) * 1000,
    "attributes": b"<p " + b" ".join(b"a%d=1" % number for number in range(100_000)) + b">x",
    "cells": b"<table><tr>" + b"<td>x" * (1 << 18),
}
"""Pages within the maximum size whose text takes from seconds to minutes."""


def parse_in_50_ms(body, charset):
    """Stand in for the parser of the worker, with a limit that a usual page just keeps."""
    page_text.MAX_CPU_S = 0.05
    return page_text.parse_in_worker(body, charset)


async def test_a_page_that_takes_long_is_refused_and_costs_no_worker(monkeypatch):
    monkeypatch.setattr(page_text, "_WORKER_FUNCTION", f"{__name__}:parse_in_50_ms")
    extractor = PageTextExtractor()
    try:
        slow = [extractor.extract(make_page(body)) for body in SLOW_PAGES.values()]
        found = await asyncio.gather(*slow, return_exceptions=True)
        assert [type(one) for one in found] == [PageRefusedError] * len(SLOW_PAGES)
        assert {str(one) for one in found} == {page_text._TOO_COMPLEX}
        assert await extractor.extract(make_page(b"<html><body><p>Otters.</p>")) == "Otters."
        assert extractor._pool.num_replaced == 0
    finally:
        extractor.close()
    with pytest.raises(WorkerCallError):
        await extractor.extract(make_page(b"<p>x"))


def test_a_page_with_too_many_tags_for_its_main_text_gives_all_its_text():
    article = ARTICLE.format("Otters eat clams. " * 20).replace("<footer>", "<div class='sidebar'>")
    assert "Imprint" not in parse_html(article.encode(), "")
    body = article.encode() + b"<br>" * page_text.MAX_MAIN_TEXT_TAGS
    assert "Imprint" in parse_html(body, "")


HOSTILE_PAGES = {
    "open_tags": b"<a<br>" * ((1 << 20) // 6),
    "nested": b"<html><body>" + b"<div>" * 100_000 + b"x",
    "attributes": b"<html><body><p " + b'a="b" ' * 100_000 + b">x</p>",
    "entities": b"<html><body><p>" + b"&amp;&#x110000;&#0;" * 50_000,
    "comments": b"<!--" * 100_000,
    "cdata": b"<![CDATA[" * 100_000,
    "doctype": b"<!DOCTYPE html [" + b"<!ENTITY a 'b'>" * 10_000 + b"]><html>&a;</html>",
    "tables": b"<html><body>" + b"<table><tr><td>" * 20_000,
    "nul": b"<html>\0<body>\0x\0",
    "xml": b'<?xml version="1.0" encoding="idna"?><html/>',
    "meta": b'<html><meta charset="zlib"><body>x</body></html>',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE_PAGES)
async def test_a_hostile_page_gives_text_or_is_refused(kind):
    (found,) = await extract(make_page(HOSTILE_PAGES[kind]))
    assert isinstance(found, (str, PageRefusedError))


def crash(body, charset):
    """Stand in for the parser of the worker, which a page makes crash."""
    page_text.parse_html = lambda *_: os.abort()
    return page_text.parse_in_worker(body, charset)


def allocate(body, charset):
    """Stand in for the parser of the worker, which needs more memory than it may."""
    page_text.parse_html = lambda *_: "x" * page_text.MAX_PARSE_BYTES
    return page_text.parse_in_worker(body, charset)


@pytest.mark.parametrize("fault", [crash, allocate])
async def test_a_fault_of_the_parser_is_a_refusal_and_costs_no_worker(monkeypatch, fault):
    monkeypatch.setattr(page_text, "_WORKER_FUNCTION", f"{__name__}:{fault.__name__}")
    extractor = PageTextExtractor()
    try:
        with pytest.raises(PageRefusedError):
            await extractor.extract(make_page(b"x"))
        assert extractor._pool.num_replaced == 0
    finally:
        extractor.close()

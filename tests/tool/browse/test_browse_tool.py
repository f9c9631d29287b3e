"""The browse tool: what it shows and caches, and how failures are classified."""

import asyncio
import socket
import threading

import pytest

from mega_agentrl.config.sections.tools import BrowseToolConfig, WebRequestConfig
from mega_agentrl.tool.browse.browse_tool import (
    EMPTY_PAGE_MESSAGE,
    MAX_TEXT_CHARS,
    BrowseTool,
    extract_page_text,
)
from mega_agentrl.tool.browse.page_fetcher import Page
from mega_agentrl.tool.browse.url_rules import PageRefusedError
from mega_agentrl.tool.web import retry
from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.types.records import ToolStatus
from tests.tool.local_server import Reply, WordCodec, serving

PLAIN = {"Content-Type": "text/plain"}
LONG = " ".join(["needle" if number == 700 else f"w{number}" for number in range(1000)])


def saying(text, **reply):
    return lambda _: Reply(text.encode(), headers=PLAIN, **reply)


def browser(server, cache=None, resolve=None, **config):
    web = {"timeout_s": 5.0, "max_calls_per_s": 0.0}
    web = {key: config.pop(key, value) for key, value in web.items()}
    config = {"allowed_domains": ["*"]} | config
    max_response_tokens = config.pop("max_response_tokens", 1024)
    options = {} if resolve is None else {"resolve": resolve}
    exempt_address = ("127.0.0.1", server.port) if server else None
    return BrowseTool(
        BrowseToolConfig(**config),
        WebRequestConfig(**web),
        WordCodec(),
        max_response_tokens=max_response_tokens,
        cache=cache,
        exempt_address=exempt_address,
        **options,
    )


async def read(tool, url, **more):
    await tool.start()
    try:
        return await tool.execute(None, {"url": url, **more}, {})
    finally:
        await tool.close()


async def test_a_page_around_the_query():
    with serving(saying(LONG)) as server:
        whole = await read(browser(server, max_response_tokens=1000), server.url)
        first = await read(browser(server, max_response_tokens=20), f" {server.url}/ ")
        words = await read(browser(server, max_response_tokens=20), f"{server.url}/ the needle")
        named = await read(
            browser(server, max_response_tokens=20), f"{server.url}/", query="needle"
        )
    assert whole.text == LONG
    assert first.text == " ".join(LONG.split()[:19]) + " ..."
    assert words.text == named.text
    assert "needle" in words.text
    assert len(words.text.split()) <= 20
    assert whole.status is ToolStatus.ok


async def test_a_page_is_fetched_once_for_all_queries(tmp_path):
    def cache():
        return DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)

    with serving(saying(LONG)) as server:
        tool = browser(server, cache(), max_response_tokens=20)
        answers = await asyncio.gather(
            *(tool.execute(None, {"url": f"{server.url}/{part}"}, {}) for part in ("", "#a", "#b"))
        )
        later = await read(
            browser(server, cache(), max_response_tokens=20), f"{server.url}/ needle"
        )
        await tool.close()
    assert len(server.requests) == 1
    assert len({answer.text for answer in answers}) == 1
    assert "needle" in later.text
    assert later.metrics == {"cached": 1.0}


async def test_domain_lists_hold_for_cached_pages_and_redirects(tmp_path):
    cache = DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)
    with serving(saying("text")) as server:
        await read(browser(server, cache), server.url)
        with pytest.raises(PageRefusedError, match="may not be read"):
            await read(browser(server, cache, denied_domains=["127.0.0.1"]), server.url)
        with pytest.raises(PageRefusedError, match="may not be read"):
            await read(browser(server, cache, allowed_domains=["example.org"]), server.url)


async def test_bad_pages_are_errors_of_the_policy():
    with serving(saying("", status=404)) as server:
        with pytest.raises(ValueError, match="The page answered HTTP 404"):
            await read(browser(server), server.url)
    with serving(saying("", status=500)) as server:
        answer = await read(browser(server), server.url)
    assert answer.status is ToolStatus.user_error
    assert "HTTP 500" in answer.text
    assert len(server.requests) == 1 + retry.NUM_RETRIES
    gone = await read(browser(server), server.url)
    assert gone.status is ToolStatus.user_error
    assert gone.text.startswith("The page could not be read: ")
    for url in ("", "what is it", "file:///etc/passwd", "http://10.0.0.1/", "http://localhost/"):
        with pytest.raises(ValueError, match=r"\w"):
            await read(browser(None), url)


async def test_infrastructure_errors_are_raised():
    async def busy(host, port):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    with pytest.raises(RuntimeError, match="try again"):
        await read(browser(None, resolve=busy), "http://example.org/")


async def test_a_slow_page_is_a_timeout():
    def slow(_):
        ended.wait(60)
        return Reply(b"late", headers=PLAIN)

    ended = threading.Event()
    with serving(slow) as server:
        answer = await read(browser(server, timeout_s=0.2), server.url)
        ended.set()
    assert (answer.status, answer.text) == (ToolStatus.timeout, "Timed out after 0.2 s.")


async def test_a_page_without_text():
    with serving(saying("")) as server:
        assert (await read(browser(server), server.url)).text == EMPTY_PAGE_MESSAGE


async def test_failures_are_not_cached(tmp_path):
    replies = [Reply(status=404), Reply(b"here", headers=PLAIN)]
    cache = DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)
    with serving(lambda _: replies.pop(0)) as server:
        with pytest.raises(ValueError, match="404"):
            await read(browser(server, cache), server.url)
        assert (await read(browser(server, cache), server.url)).text == "here"


ARTICLE = """<html><head><title>T</title><script>evil()</script><style>p {{}}</style></head><body>
<nav><a href="/">Home</a><a href="/x">Menu</a></nav>
<article><h1>Otters</h1><p>{0}</p><p>They sleep holding hands in the water, all of them.</p>
</article>
<footer>Imprint</footer></body></html>"""


def text(body, media_type="text/html", charset=""):
    return extract_page_text(
        Page(url_chain=("http://x/",), media_type=media_type, charset=charset, body=body)
    )


def test_the_main_text_without_menus_and_scripts():
    shown = text(ARTICLE.format("Otters eat many clams and fish every day. " * 8).encode())
    assert "holding hands" in shown
    assert "evil()" not in shown
    assert "Menu" not in shown


def test_a_page_without_main_text_gives_what_it_has():
    assert "tiny" in text(b"<html><body><div><span>tiny</span></div></body></html>")


def test_charsets():
    umlauts = "Füchse und Bären sind scheu und leben im Wald. " * 8
    for charset in ("utf-8", "latin-1", "utf-16"):
        assert "Bären" in text(ARTICLE.format(umlauts).encode(charset), charset=charset)
    assert "Bären" in text(ARTICLE.format(umlauts).encode(), charset="no-such-charset")
    assert "Bären" in text(ARTICLE.format(umlauts).encode())


def test_plain_kinds_are_taken_as_they_are():
    assert text(b" <b>x</b> \n", "text/plain") == "<b>x</b>"
    assert text(b'{"a": 1}', "application/json", "utf-8") == '{"a": 1}'
    assert text(b"\xff", "text/plain") == "\ufffd"


def test_nothing_to_read_is_empty():
    for body in (b"", b"   ", b"<html></html>", b"\0\0", b"<!-- -->"):
        assert text(body).strip("\0") == ""


def test_a_text_has_a_limit():
    assert len(text(b"x " * MAX_TEXT_CHARS, "text/plain")) == MAX_TEXT_CHARS

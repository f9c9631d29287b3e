"""The browse tool: what it shows and caches, and how failures are classified."""

import asyncio
import errno
import socket
import threading

import httpx
import pytest
from tenacity.wait import wait_none

from mega_agentrl.config.sections.tools import BrowseToolConfig, WebRequestConfig
from mega_agentrl.tool.browse.browse_tool import (
    EMPTY_PAGE_MESSAGE,
    BrowseTool,
)
from mega_agentrl.tool.browse.page_fetcher import Page, PageFetcher
from mega_agentrl.tool.browse.url_rules import PageRefusedError, RefusalReason
from mega_agentrl.tool.web import retry
from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.types.records import ToolStatus
from tests.tool.local_server import Reply, WordCodec, serving

PLAIN = {"Content-Type": "text/plain"}
LONG = " ".join(["needle" if number == 700 else f"w{number}" for number in range(1000)])


def saying(text, **reply):
    return lambda _: Reply(text.encode(), headers=PLAIN, **reply)


def browser(server, cache=None, timeout_s=60.0, max_response_tokens=1024, lists=None, **options):
    return BrowseTool(
        BrowseToolConfig(**{"allowed_domains": ["*"], **(lists or {})}),
        WebRequestConfig(timeout_s=timeout_s, max_calls_per_s=0.0),
        WordCodec(),
        max_response_tokens=max_response_tokens,
        cache=cache,
        exempt_address=("127.0.0.1", server.port) if server else None,
        **options,
    )


@pytest.fixture
def make_cache(tmp_path):
    return lambda: DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)


async def read(tool, url, query=""):
    await tool.start()
    try:
        return await tool.execute(None, {"url": url, "query": query}, {})
    finally:
        await tool.close()


async def test_a_page_is_shown_around_the_query():
    with serving(saying(LONG)) as server:
        whole = await read(browser(server, max_response_tokens=1000), server.url)
        brief = [
            await read(browser(server, max_response_tokens=20), *arguments)
            for arguments in (
                (f" {server.url}/ ",),
                (f"{server.url}/ the needle",),
                (f"{server.url}/", "needle"),
            )
        ]
    assert (whole.text, whole.status) == (LONG, ToolStatus.ok)
    first, words, named = (answer.text for answer in brief)
    assert first == " ".join(LONG.split()[:19]) + " ..."
    assert words == named and "needle" in words and len(words.split()) <= 20


async def test_a_page_is_fetched_once_for_all_queries(make_cache):
    with serving(saying(LONG)) as server:
        tool = browser(server, make_cache(), max_response_tokens=20)
        answers = await asyncio.gather(
            *(tool.execute(None, {"url": f"{server.url}/{part}"}, {}) for part in ("", "#a", "#b"))
        )
        other = browser(server, make_cache(), max_response_tokens=20)
        later = await read(other, f"{server.url}/", "needle")
        await tool.close()
    assert len(server.requests) == 1
    assert len({answer.text for answer in answers}) == 1
    assert "needle" in later.text and later.metrics == {"cached": 1.0}


async def test_domain_lists_hold_for_every_hop_of_a_cached_page(make_cache, monkeypatch):
    async def fetch(self, url):
        return make_page(b"text", "text/plain", url_chain=(url, "http://b.example/"))

    monkeypatch.setattr(PageFetcher, "fetch", fetch)
    url = "http://a.example/"
    assert (await read(browser(None, make_cache()), url)).text == "text"
    for lists in ({"denied_domains": ["b.example"]}, {"allowed_domains": ["a.example"]}):
        with pytest.raises(PageRefusedError) as caught:
            await read(browser(None, make_cache(), lists=lists), url)
        assert caught.value.reason is RefusalReason.domain


async def test_a_page_that_cannot_be_read_is_an_error_of_the_policy(monkeypatch):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())
    with serving(saying("", status=404)) as server:
        with pytest.raises(PageRefusedError) as caught:
            await read(browser(server), server.url)
    assert caught.value.reason is RefusalReason.status
    with serving(saying("", status=500)) as server:
        answer = await read(browser(server), server.url)
    assert answer.status is ToolStatus.user_error and "HTTP 500" in answer.text
    assert len(server.requests) == 1 + retry.NUM_RETRIES
    assert (await read(browser(server), server.url)).status is ToolStatus.user_error
    for url in ("", "what is it", "file:///etc/passwd", "http://10.0.0.1/", "http://localhost/"):
        with pytest.raises(PageRefusedError):
            await read(browser(None), url)


async def test_infrastructure_errors_are_raised():
    async def busy(host, port):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    with pytest.raises(RuntimeError) as caught:
        await read(browser(None, resolve=busy), "http://example.org/")
    assert isinstance(caught.value.__cause__, socket.gaierror)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(socket.gaierror(socket.EAI_AGAIN, "try again"), id="name"),
        pytest.param(OSError(errno.ENETUNREACH, "no route"), id="address"),
    ],
)
async def test_a_page_cannot_choose_an_infrastructure_error_while_others_are_read(
    monkeypatch, error
):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())

    async def resolve(host, port):
        raise httpx.ConnectError("failed") from error

    with serving(saying("text")) as server:
        tool = browser(server, resolve=resolve)
        assert (await tool.execute(None, {"url": server.url}, {})).text == "text"
        answer = await read(tool, "http://broken.example/")
    assert answer.status is ToolStatus.user_error


async def test_a_page_that_asks_for_a_pause_holds_up_its_own_visitors_alone(monkeypatch):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())
    busy = {"Retry-After": "600", **PLAIN}
    with serving(lambda _: Reply(b"", status=429, headers=busy)) as hostile:
        tool = browser(hostile, timeout_s=30.0)
        assert (await tool.execute(None, {"url": hostile.url}, {})).status is ToolStatus.user_error
        assert list(tool._retrier._rate_limiter._pause_ends_s) == ["127.0.0.1"]
        async with asyncio.timeout(20):
            assert await tool._retrier.run(saying_fine, "b.example") == "fine"
        await tool.close()


async def saying_fine():
    return "fine"


@pytest.mark.parametrize(
    "header", ["Mon, 99 Jan 99999999999 00:00:00 GMT", "9" * 5000, "-5", "\xff"]
)
async def test_any_retry_after_is_an_error_of_the_page(monkeypatch, header):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())
    busy = {"Retry-After": header, **PLAIN}
    with serving(lambda _: Reply(b"", status=503, headers=busy)) as server:
        answer = await read(browser(server), server.url)
    assert (answer.status, "HTTP 503" in answer.text) == (ToolStatus.user_error, True)


async def test_a_slow_page_is_a_timeout():
    def slow(_):
        ended.wait(300)
        return Reply(b"late", headers=PLAIN)

    ended = threading.Event()
    with serving(slow) as server:
        answer = await read(browser(server, timeout_s=0.2), server.url)
        ended.set()
    assert (answer.status, answer.text) == (ToolStatus.timeout, "Timed out after 0.2 s.")


async def test_the_policy_is_told_of_a_page_without_text():
    with serving(saying("")) as server:
        assert (await read(browser(server), server.url)).text == EMPTY_PAGE_MESSAGE


def make_page(body, media_type="text/html", charset="", url_chain=("http://x/",)):
    return Page(url_chain=url_chain, media_type=media_type, charset=charset, body=body)


async def test_an_html_page_is_parsed_in_another_process():
    html = b"<html><body><article><p>Otters sleep holding hands.</p></article></body></html>"
    with serving(lambda _: Reply(html, headers={"Content-Type": "text/html"})) as server:
        answer = await read(browser(server), server.url)
    assert answer.text == "Otters sleep holding hands."

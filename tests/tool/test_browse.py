"""The browse tool: what it shows, keeps, and whose fault a failure is."""

import asyncio
import socket
import threading

import pytest

from mega_agentrl.config.search_schema import BrowseToolConfig, WebConfig
from mega_agentrl.tool import web_call
from mega_agentrl.tool.browse import NO_TEXT, BrowseTool
from mega_agentrl.tool.browse_address import RefusedError
from mega_agentrl.tool.cache import DiskCache
from mega_agentrl.types.records import ToolStatus
from tests.tool.local_server import Answer, WordCodec, serving

PLAIN = {"Content-Type": "text/plain"}
LONG = " ".join(["needle" if number == 700 else f"w{number}" for number in range(1000)])


def saying(text, **reply):
    return lambda _: Answer(text.encode(), headers=PLAIN, **reply)


def browser(server, cache=None, resolve=None, **config):
    web = {"timeout_s": 5.0, "calls_per_second": 0.0}
    web = {key: config.pop(key, value) for key, value in web.items()}
    config = {"allow": ["*"]} | config
    answer_tokens = config.pop("answer_tokens", 1024)
    options = {} if resolve is None else {"resolve": resolve}
    admit = ("127.0.0.1", server.port) if server else None
    return BrowseTool(
        BrowseToolConfig(**config),
        WebConfig(**web),
        WordCodec(),
        answer_tokens=answer_tokens,
        cache=cache,
        admit=admit,
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
        whole = await read(browser(server, answer_tokens=1000), server.url)
        first = await read(browser(server, answer_tokens=20), f" {server.url}/ ")
        words = await read(browser(server, answer_tokens=20), f"{server.url}/ the needle")
        named = await read(browser(server, answer_tokens=20), f"{server.url}/", query="needle")
    assert whole.text == LONG
    assert first.text == " ".join(LONG.split()[:19]) + " ..."
    assert words.text == named.text
    assert "needle" in words.text
    assert len(words.text.split()) <= 20
    assert whole.status is ToolStatus.ok


async def test_a_page_is_fetched_once_for_all_queries(tmp_path):
    def cache():
        return DiskCache(tmp_path / "c.sqlite", ttl_s=0, size_bytes=1 << 26)

    with serving(saying(LONG)) as server:
        tool = browser(server, cache(), answer_tokens=20)
        answers = await asyncio.gather(
            *(tool.execute(None, {"url": f"{server.url}/{part}"}, {}) for part in ("", "#a", "#b"))
        )
        later = await read(browser(server, cache(), answer_tokens=20), f"{server.url}/ needle")
        await tool.close()
    assert len(server.asked) == 1
    assert len({answer.text for answer in answers}) == 1
    assert "needle" in later.text
    assert later.metrics == {"cached": 1.0}


async def test_the_lists_hold_for_kept_pages_and_for_every_hop(tmp_path):
    cache = DiskCache(tmp_path / "c.sqlite", ttl_s=0, size_bytes=1 << 26)
    with serving(saying("text")) as server:
        await read(browser(server, cache), server.url)
        with pytest.raises(RefusedError, match="may not be read"):
            await read(browser(server, cache, deny=["127.0.0.1"]), server.url)
        with pytest.raises(RefusedError, match="may not be read"):
            await read(browser(server, cache, allow=["example.org"]), server.url)


async def test_what_the_policy_chose_wrongly_it_is_told():
    with serving(saying("", status=404)) as server:
        with pytest.raises(ValueError, match="The page answered HTTP 404"):
            await read(browser(server), server.url)
    with serving(saying("", status=500)) as server:
        answer = await read(browser(server), server.url)
    assert answer.status is ToolStatus.user_error
    assert "HTTP 500" in answer.text
    assert len(server.asked) == 1 + web_call.NUM_RETRIES
    gone = await read(browser(server), server.url)
    assert gone.status is ToolStatus.user_error
    assert gone.text.startswith("The page could not be read: ")
    for url in ("", "what is it", "file:///etc/passwd", "http://10.0.0.1/", "http://localhost/"):
        with pytest.raises(ValueError, match=r"\w"):
            await read(browser(None), url)


async def test_what_is_ours_is_raised():
    async def busy(host, port):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    with pytest.raises(RuntimeError, match="try again"):
        await read(browser(None, resolve=busy), "http://example.org/")


async def test_a_slow_page_is_a_timeout():
    def slow(_):
        ended.wait(60)
        return Answer(b"late", headers=PLAIN)

    ended = threading.Event()
    with serving(slow) as server:
        answer = await read(browser(server, timeout_s=0.2), server.url)
        ended.set()
    assert (answer.status, answer.text) == (ToolStatus.timeout, "Timed out after 0.2 s.")


async def test_a_page_without_text():
    with serving(saying("")) as server:
        assert (await read(browser(server), server.url)).text == NO_TEXT


async def test_failures_are_not_kept(tmp_path):
    replies = [Answer(status=404), Answer(b"here", headers=PLAIN)]
    cache = DiskCache(tmp_path / "c.sqlite", ttl_s=0, size_bytes=1 << 26)
    with serving(lambda _: replies.pop(0)) as server:
        with pytest.raises(ValueError, match="404"):
            await read(browser(server, cache), server.url)
        assert (await read(browser(server, cache), server.url)).text == "here"

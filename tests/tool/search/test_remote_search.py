"""Remote search: requests sent, responses parsed, caching and errors."""

import asyncio
import json

import pytest
from tenacity.wait import wait_none

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.sections.tools import SearchToolConfig, WebRequestConfig
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.search.local_index import Document
from mega_agentrl.tool.search.remote import RemoteSearch
from mega_agentrl.tool.web import retry
from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.tool.web.retry import HttpStatusError, TransientError
from tests.tool.local_server import Reply, serving

RETRIEVED = {
    "result": [
        [
            {"document": {"id": "7", "contents": '"Paris"\nIt is\nbig.'}, "score": 0.9},
            {"document": {"id": "8", "contents": "no title here"}, "score": 0.1},
        ]
    ]
}
ORGANIC = {
    "organic": [
        {"title": "Paris", "link": "https://p.example/", "snippet": "It is big.", "position": 1},
        {"title": "Lyon", "link": "https://l.example/"},
    ]
}
BING = {"webPages": {"value": [{"name": "Paris", "url": "https://p.example/", "snippet": "Big."}]}}


def answering(value, **reply):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda _: Reply(body, **reply)


def remote(server, backend=SearchBackend.retrieve, path="", cache=None, key="", timeout_s=60.0):
    config = SearchToolConfig(backend=backend, source=f"{server.url}{path}")
    web = WebRequestConfig(timeout_s=timeout_s, max_calls_per_s=0.0)
    return RemoteSearch(config, web, cache, key)


async def test_a_retrieval_server_is_asked_with_one_query():
    with serving(answering(RETRIEVED)) as server:
        search = remote(server, path="/retrieve")
        found = await search.search("  capital\nof France ", 2)
        await search.close()
    assert found == [
        Document(doc_id="7", title="Paris", text="It is\nbig."),
        Document(doc_id="8", title="", text="no title here"),
    ]
    (asked,) = server.requests
    assert (asked.method, asked.path) == ("POST", "/retrieve")
    expected = {"queries": ["capital of France"], "topk": 2, "return_scores": True}
    assert json.loads(asked.body) == expected
    with serving(answering({"result": [[{"id": 1, "contents": "t\nx"}]]})) as server:
        assert await remote(server).search("q", 1) == [Document(doc_id="1", title="t", text="x")]


async def test_a_web_search_is_asked_with_its_key_and_parameters():
    with serving(answering(ORGANIC)) as server:
        search = remote(server, SearchBackend.web, "/search?gl=us", key="secret")
        found = await search.search("a&b=c", 2)
    url = "https://p.example/"
    assert found[0] == Document(doc_id=url, title="Paris", text="It is big.", url=url)
    assert (found[1].title, found[1].text) == ("Lyon", "")
    (asked,) = server.requests
    assert (asked.method, asked.path) == ("GET", "/search?gl=us&q=a%26b%3Dc&num=2&count=2")
    assert asked.headers["x-api-key"] == "secret"
    assert asked.headers["authorization"] == "Bearer secret"
    with serving(answering(BING)) as server:
        found = await remote(server, SearchBackend.web).search("q", 3)
        assert [(d.title, d.url) for d in found] == [("Paris", "https://p.example/")]
    with serving(answering(ORGANIC)) as server:
        assert len(await remote(server, SearchBackend.web).search("q", 1)) == 1


async def test_bad_queries_are_not_asked():
    with serving(answering(RETRIEVED)) as server:
        for query in ("", " \n\0", "x" * 2001):
            with pytest.raises(ToolInputError):
                await remote(server).search(query, 1)
    assert server.requests == []


FULL = {"id": "1", "contents": "t\nx"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([{"document": {"contents": None}}], [], id="null contents"),
        pytest.param(
            [{"document": None}, {"document": FULL}], [("1", "t", "x")], id="null document"
        ),
        pytest.param([None, FULL], [("1", "t", "x")], id="null entry"),
        pytest.param(None, [], id="null list"),
        pytest.param([], [], id="no entry"),
        pytest.param([{"id": "2"}, FULL], [("1", "t", "x")], id="missing contents"),
        pytest.param([{"id": "2", "contents": " \n "}, FULL], [("1", "t", "x")], id="blank"),
        pytest.param([{"id": None, "contents": "x"}], [("", "", "x")], id="null id"),
        pytest.param([{"id": 7, "contents": 3.5}], [("7", "", "3.5")], id="numbers"),
        pytest.param([{"contents": "t\n"}], [("", "t", "")], id="title alone"),
    ],
)
async def test_what_a_retrieval_server_lacks_is_left_out(entries, expected):
    with serving(answering({"result": [entries]})) as server:
        found = await remote(server).search("q", 1)
    assert [(document.doc_id, document.title, document.text) for document in found] == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"organic": None}, [], id="null"),
        pytest.param(
            {"organic": [None, {}, {"title": None, "link": None, "snippet": "x"}]},
            [("", "x", "")],
            id="null fields",
        ),
        pytest.param(
            {"organic": [{"title": None, "name": "n", "link": "u", "snippet": 5}]},
            [("n", "5", "u")],
            id="number",
        ),
        pytest.param({"_type": "SearchResponse", "queryContext": {}}, [], id="no pages"),
        pytest.param({"_type": "SearchResponse", "webPages": None}, [], id="null pages"),
    ],
)
async def test_what_a_web_search_lacks_is_left_out(body, expected):
    with serving(answering(body)) as server:
        found = await remote(server, SearchBackend.web).search("q", 3)
    assert [(document.title, document.text, document.url) for document in found] == expected


async def test_failures_are_not_cached_and_answers_are(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "NUM_RETRIES", 0)
    replies = [Reply(status=500), Reply(status=404), Reply(b"nonsense"), answering(RETRIEVED)(None)]
    cache = DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)
    with serving(lambda _: replies.pop(0)) as server:
        search = remote(server, cache=cache)
        for error in (TransientError, HttpStatusError, RuntimeError):
            with pytest.raises(error):
                await search.search("q", 2)
        found = await search.search("q", 2)
        assert await search.search(" q ", 2) == found
        assert await remote(server, cache=cache).search("q", 2) == found
    assert len(server.requests) == 4


async def test_equal_concurrent_queries_are_sent_once():
    with serving(answering(RETRIEVED)) as server:
        search = remote(server)
        await asyncio.gather(*(search.search(query, 2) for query in ["a", "a ", "a", "b"]))
        await search.search("a", 1)
    asked = sorted(
        (json.loads(a.body)["queries"][0], json.loads(a.body)["topk"]) for a in server.requests
    )
    assert asked == [("a", 1), ("a", 2), ("b", 2)]


async def test_a_transient_status_is_retried(monkeypatch):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())
    replies = [Reply(status=503), answering(RETRIEVED)(None)]
    with serving(lambda _: replies.pop(0)) as server:
        assert len(await remote(server).search("q", 2)) == 2


@pytest.mark.parametrize("status", [302, 400, 401])
async def test_a_status_of_the_server_is_no_error_of_the_policy(status):
    with serving(answering(b"", status=status, headers={"Location": "/"})) as server:
        with pytest.raises(HttpStatusError):
            await remote(server).search("q", 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"result": []}',
        b'{"result": [[{"document": {}}]]}',
        b'{"result": [[{"document": {"id": "1"}}]]}',
        b'{"result": [[{"document": {"contents": ["a"]}}]]}',
        b'{"result": [[{"document": {"contents": true}}]]}',
        b'{"result": [["a"]]}',
        b'{"result": null}',
        b"null",
        b"\xff",
        b"{",
    ],
)
async def test_a_malformed_body_is_no_error_of_the_policy(body):
    with serving(answering(body)) as server:
        with pytest.raises(RuntimeError, match="unexpected answer format"):
            await remote(server).search("q", 1)


async def test_a_server_that_refuses_or_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(retry, "_BACKOFF", wait_none())
    with serving(answering(RETRIEVED)) as server:
        pass
    with pytest.raises(TransientError) as caught:
        await remote(server).search("q", 1)
    assert caught.value.status is None
    release = asyncio.Event()
    blocked = await asyncio.start_server(lambda *_: release.wait(), "127.0.0.1", 0)
    server.port = blocked.sockets[0].getsockname()[1]
    with pytest.raises(TimeoutError):
        await remote(server, timeout_s=0.2).search("q", 1)
    release.set()
    blocked.close()


def test_one_search_serves_several_loops():
    with serving(answering(RETRIEVED)) as server:
        search = remote(server)
        for query in "abc":
            assert len(asyncio.run(search.search(query, 2))) == 2

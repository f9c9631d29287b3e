"""The search tool's responses with each of its backends."""

import json
import threading

import pytest

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import SearchToolConfig, WebRequestConfig
from mega_agentrl.tool.search import search_tool
from mega_agentrl.tool.search.search_tool import NO_RESULTS_MESSAGE, SearchTool
from mega_agentrl.tool.web import retry
from mega_agentrl.types.records import ToolStatus
from tests.fakes import CharCodec
from tests.tool.local_server import Reply, WordCodec, serving


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [("Paris", "Paris is\n the capital."), ("Lyon", "Lyon is near Paris, in the south.")]
    lines = [json.dumps({"id": i, "title": a, "text": b}) for i, (a, b) in enumerate(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


async def answer(
    query, codec=None, fallback_dir=None, key="", timeout_s=60.0, max_response_tokens=1024, **config
):
    tool = SearchTool(
        SearchToolConfig(**config),
        WebRequestConfig(timeout_s=timeout_s),
        codec or WordCodec(),
        max_response_tokens=max_response_tokens,
        fallback_dir=fallback_dir,
        api_key=key,
    )
    await tool.start()
    try:
        return await tool.execute(None, {"query": query}, {})
    finally:
        await tool.close()


async def ask(query, codec=None, **config):
    return (await answer(query, codec, **config)).text


async def test_one_document_is_its_text(corpus):
    assert await ask("paris", source=corpus, top_k=1) == "Paris is the capital."


async def test_several_documents_are_numbered_pages(corpus):
    text = await ask("paris", source=corpus, top_k=5, max_response_tokens=20)
    assert text == "Page 1: Paris. Paris is the capital.\nPage 2: Lyon. Lyon is near ..."
    text = await ask("paris", CharCodec(), source=corpus, top_k=5, max_response_tokens=64)
    assert text == "Page 1: Paris. Paris is ...\nPage 2: Lyon. Lyon is ..."


async def test_a_query_without_results_says_so(corpus):
    assert await ask("berlin", source=corpus) == NO_RESULTS_MESSAGE
    assert await ask('"(', source=corpus) == NO_RESULTS_MESSAGE


async def test_the_index_lies_beside_the_corpus_or_in_the_fallback_folder(
    corpus, tmp_path, monkeypatch
):
    def indexes(folder):
        return [path for path in folder.glob("*.index") if path.is_dir()]

    await ask("paris", source=corpus)
    assert len(indexes(tmp_path)) == 1
    monkeypatch.setattr(search_tool, "is_writable", lambda folder: False)
    await answer("paris", source=corpus, fallback_dir=tmp_path / "cache")
    assert len(indexes(tmp_path / "cache")) == 1


async def test_pages_of_the_web_show_their_address():
    found = {"organic": [{"title": "Paris", "link": "https://p.example/", "snippet": "It is big."}]}
    web = {"backend": SearchBackend.web, "api_key_env": "K", "key": "k"}
    with serving(lambda _: Reply(json.dumps(found).encode())) as server:
        text = await ask("paris", source=server.url, top_k=1, **web)
    assert text == "Page 1: Paris (https://p.example/). It is big."


async def test_failures_are_classified(monkeypatch):
    monkeypatch.setattr(retry, "NUM_RETRIES", 0)
    with serving(lambda _: Reply(status=500)) as server:
        with pytest.raises(retry.TransientError) as caught:
            await ask("q", source=server.url, backend=SearchBackend.retrieve)
    assert caught.value.status == 500
    ended = threading.Event()
    with serving(lambda _: ended.wait(300) and Reply()) as server:
        late = await answer("q", source=server.url, backend=SearchBackend.retrieve, timeout_s=0.3)
        ended.set()
    assert (late.status, late.text) == (ToolStatus.timeout, "Timed out after 0.3 s.")


async def test_a_missing_key_fails_at_the_start():
    with pytest.raises(ConfigError) as caught:
        await ask("q", backend=SearchBackend.web, source="http://x", api_key_env="NO_SUCH_KEY")
    assert (caught.value.key, caught.value.got) == ("tool.search.api_key_env", "NO_SUCH_KEY")

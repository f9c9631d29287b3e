"""The search tool's answers."""

import json

import pytest

from mega_agentrl.config.schema import SearchToolConfig
from mega_agentrl.tool.search import NOTHING_FOUND, SearchTool


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [("Paris", "Paris is\n the capital."), ("Lyon", "Lyon is near Paris, in the south.")]
    lines = [json.dumps({"id": i, "title": a, "text": b}) for i, (a, b) in enumerate(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


async def ask(query, **config):
    tool = SearchTool(SearchToolConfig(**config))
    await tool.start()
    return (await tool.execute(None, {"query": query}, {})).text


async def test_one_document_is_its_text(corpus):
    assert await ask("paris", corpus=corpus, top_k=1) == "Paris is the capital."


async def test_several_are_pages(corpus):
    answer = await ask("paris", corpus=corpus, top_k=5, snippet_chars=10)
    assert answer == "Page 1: Paris. Paris is t\nPage 2: Lyon. Lyon is ne"


async def test_nothing_found(corpus):
    assert await ask("berlin", corpus=corpus) == NOTHING_FOUND
    assert await ask('"(', corpus=corpus) == NOTHING_FOUND


async def test_missing_corpus():
    with pytest.raises(ValueError, match=r"tool.search.corpus=/nowhere/c.jsonl"):
        await ask("x", corpus="/nowhere/c.jsonl")

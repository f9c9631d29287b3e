"""Answers come from the cache, or are asked once; failures are never kept."""

import asyncio

import pytest

from mega_agentrl.tool.cache import DiskCache
from mega_agentrl.tool.cached_ask import CachedAsk, cache_key, normalise


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "c.sqlite", ttl_s=0, size_bytes=1 << 26)


def asker(answers):
    async def ask():
        await asyncio.sleep(0.01)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


async def test_asked_once_and_then_known(cache):
    asked, ask = CachedAsk(cache), asker(["one"])
    answers = await asyncio.gather(*(asked.answer("k", ask) for _ in range(5)))
    assert answers == [("one", False)] * 5
    assert await CachedAsk(cache).answer("k", ask) == ("one", True)


async def test_failures_are_not_kept(cache):
    asked, ask = CachedAsk(cache), asker([RuntimeError("down"), "up"])
    with pytest.raises(RuntimeError, match="down"):
        await asked.answer("k", ask)
    assert await asked.answer("k", ask) == ("up", False)


async def test_without_a_cache():
    asked, ask = CachedAsk(None), asker(["one", "two"])
    assert await asked.answer("k", ask) == ("one", False)
    assert await asked.answer("k", ask) == ("two", False)


def test_a_key_is_of_everything_and_of_nothing_else():
    parts = [("a", "b", 1), ("a", "b", 2), ("ab", "", 1), ("a", "b1"), ("a", "b", "1")]
    assert len({cache_key(*part) for part in parts}) == len(parts)
    assert cache_key("a", 1) == cache_key("a", 1)


def test_queries_that_are_the_same_question():
    assert normalise("  who \n\t is   it\0 ") == "who is it"
    assert normalise("e\u0301") == normalise("\u00e9") == "é"
    assert normalise("\ud800") == "?"
    assert normalise(" \u200b\0 ") == ""

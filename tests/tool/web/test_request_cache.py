"""Answers come from the cache or are fetched once; failures are never cached."""

import asyncio

import pytest

from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.tool.web.request_cache import RequestCache, cache_key, normalize_query


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)


def fetcher(answers):
    async def fetch():
        await asyncio.sleep(0.01)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return fetch


async def test_fetched_once_and_then_cached(cache):
    cache_under_test, fetch = RequestCache(cache), fetcher(["one"])
    answers = await asyncio.gather(*(cache_under_test.get_or_fetch("k", fetch) for _ in range(5)))
    assert answers == [("one", False)] * 5
    assert await RequestCache(cache).get_or_fetch("k", fetch) == ("one", True)


async def test_failures_are_not_cached(cache):
    cache_under_test, fetch = RequestCache(cache), fetcher([RuntimeError("down"), "up"])
    with pytest.raises(RuntimeError, match="down"):
        await cache_under_test.get_or_fetch("k", fetch)
    assert await cache_under_test.get_or_fetch("k", fetch) == ("up", False)


async def test_without_a_cache():
    cache_under_test, fetch = RequestCache(None), fetcher(["one", "two"])
    assert await cache_under_test.get_or_fetch("k", fetch) == ("one", False)
    assert await cache_under_test.get_or_fetch("k", fetch) == ("two", False)


def test_the_key_depends_on_every_part():
    parts = [("a", "b", 1), ("a", "b", 2), ("ab", "", 1), ("a", "b1"), ("a", "b", "1")]
    assert len({cache_key(*part) for part in parts}) == len(parts)
    assert cache_key("a", 1) == cache_key("a", 1)


def test_equivalent_queries_are_normalized_alike():
    assert normalize_query("  who \n\t is   it\0 ") == "who is it"
    assert normalize_query("e\u0301") == normalize_query("\u00e9") == "é"
    assert normalize_query("\ud800") == "?"
    assert normalize_query(" \u200b\0 ") == ""

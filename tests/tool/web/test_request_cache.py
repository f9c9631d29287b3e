"""Answers come from the cache or are fetched once; failures are never cached."""

import asyncio
import threading

import pytest

from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.tool.web.request_cache import (
    RequestCache,
    SingleFlight,
    cache_key,
    normalize_query,
)


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


class Work:
    """Counts its runs; ends once `release` is set."""

    def __init__(self, error=None):
        self.num_runs = 0
        self.release = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.num_runs += 1
        await self.release.wait()
        if self.error:
            raise self.error
        return self.num_runs


async def begin(single_flight, keys, work):
    tasks = [asyncio.create_task(single_flight.run(key, work)) for key in keys]
    await asyncio.sleep(0.01)
    return tasks


async def test_equal_keys_run_once_others_by_themselves():
    single_flight, work = SingleFlight(), Work()
    tasks = await begin(single_flight, "aaab", work)
    work.release.set()
    assert [await task for task in tasks] == [2, 2, 2, 2]
    assert work.num_runs == 2
    assert await single_flight.run("a", work) == 3


async def test_a_failure_is_shared_and_not_kept():
    single_flight, work = SingleFlight(), Work(error=ValueError("no"))
    tasks = await begin(single_flight, "aa", work)
    work.release.set()
    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task
    work.error = None
    assert await single_flight.run("a", work) == 2


async def test_a_cancelled_caller_does_not_cancel_the_others():
    single_flight, work = SingleFlight(), Work()
    first, second = await begin(single_flight, "aa", work)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.release.set()
    assert await second == 1


async def test_all_callers_may_be_cancelled():
    single_flight, work = SingleFlight(), Work(error=ValueError("unheard"))
    for task in await begin(single_flight, "aa", work):
        task.cancel()
    work.release.set()
    await asyncio.sleep(0.01)
    work.error = None
    assert await single_flight.run("a", work) == 2


def test_over_loops_and_after_one_has_ended():
    single_flight, runs, started, go = SingleFlight(), [], threading.Event(), threading.Event()

    async def work():
        runs.append(1)
        started.set()
        while not go.is_set():
            await asyncio.sleep(0.005)
        return "answer"

    results = []
    call = lambda: results.append(asyncio.run(single_flight.run("a", work)))  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(3)]
    threads[0].start()
    assert started.wait(5)
    for thread in threads[1:]:
        thread.start()
    threading.Timer(0.1, go.set).start()
    for thread in threads:
        thread.join(10)
    assert results == ["answer"] * 3
    assert runs == [1]

    async def leave():
        task = asyncio.ensure_future(single_flight.run("b", lambda: asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        return task

    asyncio.run(leave())
    assert asyncio.run(single_flight.run("b", work)) == "answer"

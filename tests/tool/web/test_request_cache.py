"""Answers come from the cache or are fetched once; failures are never cached."""

import asyncio
import threading

import pytest

from mega_agentrl.tool.web.disk_cache import DiskCache
from mega_agentrl.tool.web.request_cache import RequestCache, cache_key, normalize_query


class Fetch:
    """Counts its runs; answers or fails once `release` is set."""

    def __init__(self, error=None):
        self.num_runs = 0
        self.release = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.num_runs += 1
        await self.release.wait()
        if self.error:
            raise self.error
        return f"answer {self.num_runs}"


async def begin(cache, keys, fetch):
    tasks = [asyncio.create_task(cache.get_or_fetch(key, fetch)) for key in keys]
    await asyncio.sleep(0.01)
    return tasks


def test_the_key_depends_on_every_part():
    parts = [("a", "b", 1), ("a", "b", 2), ("ab", "", 1), ("a", "b1"), ("a", "b", "1")]
    assert len({cache_key(*part) for part in parts}) == len(parts)
    assert cache_key("a", 1) == cache_key("a", 1)


def test_equivalent_queries_are_normalized_alike():
    assert normalize_query("  who \n\t is   it\0 ") == "who is it"
    assert normalize_query("e\u0301") == normalize_query("\u00e9") == "é"
    assert normalize_query("\ud800") == "?"
    assert normalize_query(" \u200b\0 ") == ""


async def test_an_answer_is_fetched_once_and_then_cached(tmp_path):
    disk = DiskCache(tmp_path / "c.sqlite", ttl_s=0, max_bytes=1 << 26)
    cache, fetch = RequestCache(disk), Fetch(ConnectionError())
    fetch.release.set()
    with pytest.raises(ConnectionError):
        await cache.get_or_fetch("k", fetch)
    fetch.error = None
    tasks = await begin(cache, "kkk", fetch)
    assert [await task for task in tasks] == [("answer 2", False)] * 3
    assert await RequestCache(disk).get_or_fetch("k", fetch) == ("answer 2", True)


async def test_without_a_disk_equal_concurrent_keys_are_fetched_once():
    cache, fetch = RequestCache(None), Fetch()
    tasks = await begin(cache, "aaab", fetch)
    fetch.release.set()
    assert [await task for task in tasks] == [("answer 2", False)] * 4
    assert await cache.get_or_fetch("a", fetch) == ("answer 3", False)


async def test_a_failure_is_raised_to_all_callers_and_not_cached():
    cache, fetch = RequestCache(None), Fetch(ConnectionError())
    tasks = await begin(cache, "aa", fetch)
    fetch.release.set()
    for task in tasks:
        with pytest.raises(ConnectionError):
            await task
    fetch.error = None
    assert await cache.get_or_fetch("a", fetch) == ("answer 2", False)


@pytest.mark.parametrize("num_cancelled", [1, 2])
async def test_cancelled_callers_leave_the_work_to_the_others(num_cancelled):
    cache, fetch = RequestCache(None), Fetch()
    tasks = await begin(cache, "aa", fetch)
    for task in tasks[:num_cancelled]:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    fetch.release.set()
    answers = [await task for task in tasks[num_cancelled:]]
    assert answers == [("answer 1", False)] * (2 - num_cancelled)
    await asyncio.sleep(0.01)
    assert await cache.get_or_fetch("a", fetch) == ("answer 2", False)


def test_event_loops_share_work_and_repeat_that_of_an_ended_loop():
    cache, runs, joined, go = RequestCache(None), [], threading.Barrier(3), threading.Event()

    async def fetch():
        runs.append(1)
        while not go.is_set():
            await asyncio.sleep(0.005)
        return "answer"

    answers = []

    async def call():
        task = asyncio.ensure_future(cache.get_or_fetch("a", fetch))
        await asyncio.sleep(0)  # it begins the work, or waits for it
        await asyncio.to_thread(joined.wait, 60)
        go.set()
        answers.append(await task)

    threads = [threading.Thread(target=lambda: asyncio.run(call())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [("answer", False)] * 3
    assert runs == [1]

    async def leave():
        task = asyncio.ensure_future(cache.get_or_fetch("b", lambda: asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        return task

    asyncio.run(leave())
    assert asyncio.run(cache.get_or_fetch("b", fetch)) == ("answer", False)

"""Equal questions at once are asked once, whoever gives up meanwhile."""

import asyncio
import threading

import pytest

from mega_agentrl.tool.single_flight import SingleFlight


class Work:
    """Counts its runs; ends when it is let go."""

    def __init__(self, error=None):
        self.runs = 0
        self.go = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.runs += 1
        await self.go.wait()
        if self.error:
            raise self.error
        return self.runs


async def begin(flights, keys, work):
    tasks = [asyncio.create_task(flights.run(key, work)) for key in keys]
    await asyncio.sleep(0.01)
    return tasks


async def test_equal_keys_run_once_others_by_themselves():
    flights, work = SingleFlight(), Work()
    tasks = await begin(flights, "aaab", work)
    work.go.set()
    assert [await task for task in tasks] == [2, 2, 2, 2]
    assert work.runs == 2
    assert await flights.run("a", work) == 3


async def test_a_failure_is_everybodys_and_is_not_kept():
    flights, work = SingleFlight(), Work(error=ValueError("no"))
    tasks = await begin(flights, "aa", work)
    work.go.set()
    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task
    work.error = None
    assert await flights.run("a", work) == 2


async def test_who_gives_up_does_not_end_it_for_the_others():
    flights, work = SingleFlight(), Work()
    first, second = await begin(flights, "aa", work)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.go.set()
    assert await second == 1


async def test_everybody_may_give_up():
    flights, work = SingleFlight(), Work(error=ValueError("unheard"))
    for task in await begin(flights, "aa", work):
        task.cancel()
    work.go.set()
    await asyncio.sleep(0.01)
    work.error = None
    assert await flights.run("a", work) == 2


def test_over_loops_and_after_one_has_ended():
    flights, runs, started, go = SingleFlight(), [], threading.Event(), threading.Event()

    async def work():
        runs.append(1)
        started.set()
        while not go.is_set():
            await asyncio.sleep(0.005)
        return "answer"

    results = []
    ask = lambda: results.append(asyncio.run(flights.run("a", work)))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
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
        flight = asyncio.ensure_future(flights.run("b", lambda: asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        return flight

    asyncio.run(leave())
    assert asyncio.run(flights.run("b", work)) == "answer"

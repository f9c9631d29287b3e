"""Round trips are shared, and errors reach everyone who waits."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from mega_agentrl.generator.entropy_tap.tap_reader import TapReader


class SlowWorkers:
    """Two workers; rank 1 answers None. Each round trip takes a while."""

    def __init__(self, error=None):
        self.calls = []
        self._error = error

    async def collective_rpc(self, method, args):
        keys, take = args
        self.calls.append((tuple(keys), take))
        await asyncio.sleep(0.02)
        if self._error:
            raise self._error
        return [[([float(key)], [0.0], [1]) for key in keys], None]


async def test_requests_of_a_tick_share_a_round_trip_and_later_ones_the_next():
    workers = SlowWorkers()
    reader = TapReader(workers)
    first = [asyncio.create_task(reader.take(str(key))) for key in range(5)]
    await asyncio.sleep(0.01)
    second = [asyncio.create_task(reader.take(str(key))) for key in (7, 8)]
    records = await asyncio.gather(*first, *second)
    assert [record[0] for record in records] == [[0.0], [1.0], [2.0], [3.0], [4.0], [7.0], [8.0]]
    assert workers.calls == [(("0", "1", "2", "3", "4"), True), (("7", "8"), True)]


async def test_peeking_does_not_delete():
    workers = SlowWorkers()
    reader = TapReader(workers)
    await asyncio.gather(reader.peek("1"), reader.take("2"))
    assert sorted(workers.calls) == [(("1",), False), (("2",), True)]


async def test_an_error_reaches_all_and_the_next_request_starts_anew():
    workers = SlowWorkers(RuntimeError("dead"))
    reader = TapReader(workers)
    results = await asyncio.gather(reader.take("1"), reader.take("2"), return_exceptions=True)
    assert [str(result) for result in results] == ["dead", "dead"]
    workers._error = None
    assert (await reader.take("3"))[0] == [3.0]


async def test_discarding_deletes_without_waiting():
    workers = SlowWorkers(RuntimeError("dead"))
    reader = TapReader(workers)
    reader.discard("1")
    await asyncio.sleep(0.05)
    assert workers.calls == [(("1",), True)]

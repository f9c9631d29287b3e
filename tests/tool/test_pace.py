"""Starts are spread over everybody; who cannot wait takes none."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from mega_agentrl.tool import pace as pace_module
from mega_agentrl.tool.pace import Pace, PaceError


async def test_starts_are_spread():
    pace, starts = Pace(50), []

    async def call():
        await pace.wait(10)
        starts.append(time.monotonic())

    await asyncio.gather(*(call() for _ in range(11)))
    assert max(starts) - min(starts) >= 0.19


def test_over_loops_and_threads():
    pace, starts = Pace(50), []

    async def calls():
        for _ in range(4):
            await pace.wait(10)
            starts.append(time.monotonic())

    threads = [threading.Thread(target=lambda: asyncio.run(calls())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert max(starts) - min(starts) >= 0.21


async def test_who_cannot_wait_takes_no_start(monkeypatch):
    now_s, slept_s = [1000.0], []

    async def sleep(wait_s):
        slept_s.append(wait_s)

    monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(pace_module, "asyncio", SimpleNamespace(sleep=sleep))
    pace = Pace(1)
    await pace.wait(0)
    for _ in range(1000):
        with pytest.raises(PaceError, match="calls than the limit"):
            await pace.wait(0.5)
    now_s[0] += 0.25
    await pace.wait(0.75)
    assert slept_s == [0.75]


async def test_no_limit_and_a_pause():
    pace = Pace(0)
    for _ in range(1000):
        await pace.wait(0)
    pace.pause(0.1)
    with pytest.raises(PaceError):
        await pace.wait(0.01)
    begin = time.monotonic()
    await pace.wait(1)
    assert time.monotonic() - begin >= 0.08

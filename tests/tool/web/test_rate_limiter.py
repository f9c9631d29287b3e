"""Starts are spread evenly; a caller that cannot wait takes none."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from mega_agentrl.tool.web import rate_limiter
from mega_agentrl.tool.web.rate_limiter import RateLimiter, RateLimitError


async def test_starts_are_spread():
    limiter, starts = RateLimiter(50), []

    async def call():
        await limiter.acquire(10)
        starts.append(time.monotonic())

    await asyncio.gather(*(call() for _ in range(11)))
    assert max(starts) - min(starts) >= 0.19


def test_over_loops_and_threads():
    limiter, starts = RateLimiter(50), []

    async def calls():
        for _ in range(4):
            await limiter.acquire(10)
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

    monkeypatch.setattr(rate_limiter, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(rate_limiter, "asyncio", SimpleNamespace(sleep=sleep))
    limiter = RateLimiter(1)
    await limiter.acquire(0)
    for _ in range(1000):
        with pytest.raises(RateLimitError, match="calls than the limit"):
            await limiter.acquire(0.5)
    now_s[0] += 0.25
    await limiter.acquire(0.75)
    assert slept_s == [0.75]


async def test_no_limit_and_a_pause():
    limiter = RateLimiter(0)
    for _ in range(1000):
        await limiter.acquire(0)
    limiter.pause(0.1)
    with pytest.raises(RateLimitError):
        await limiter.acquire(0.01)
    begin = time.monotonic()
    await limiter.acquire(1)
    assert time.monotonic() - begin >= 0.08

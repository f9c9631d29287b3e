"""Tries again only what may pass, no longer than the deadline, and as servers ask."""

import asyncio
import socket
import threading
import time
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest
from tenacity.wait import wait_random_exponential

from mega_agentrl.tool.web import retry
from mega_agentrl.tool.web.retry import (
    HttpStatusError,
    RateLimiter,
    RateLimitError,
    RequestRetrier,
    TransientError,
    raise_for_status,
    read_body,
)


def now_s():
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The limiter reads the clock of the loop; see `conftest`."""
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=now_s, time=time.time))


class Script:
    """Ends its calls as told, one after the other; the last way for good."""

    def __init__(self, *ends):
        self.ends = list(ends)
        self.times = []

    async def __call__(self):
        self.times.append(now_s())
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, float):
            await asyncio.sleep(end)
            return "late"
        if isinstance(end, Exception):
            raise end
        return end


def call(timeout_s=5.0, calls_per_second=0.0):
    return RequestRetrier(timeout_s=timeout_s, calls_per_second=calls_per_second)


@pytest.mark.parametrize(
    "error",
    [
        TransientError("503"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("broken"),
        httpx.ReadError("reset"),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
    ],
)
async def test_transient_errors_are_retried(monkeypatch, error):
    monkeypatch.setattr(retry, "_BACKOFF", wait_random_exponential(multiplier=0.01))
    script = Script(error, error, "fine")
    assert await call().run(script) == "fine"
    assert len(script.times) == 3
    script = Script(error)
    with pytest.raises(TransientError):
        await call().run(script)
    assert len(script.times) == 1 + retry.NUM_RETRIES


@pytest.mark.parametrize(
    "error", [HttpStatusError(404, "404"), ValueError("bad"), OSError(2, "no"), RuntimeError("bug")]
)
async def test_other_errors_are_not_retried(error):
    script = Script(error, "fine")
    with pytest.raises(type(error)):
        await call().run(script)
    assert len(script.times) == 1


async def test_the_deadline_covers_all_attempts_and_waits(monkeypatch):
    with pytest.raises(TimeoutError):
        await call(timeout_s=0.2).run(Script(600.0))
    monkeypatch.setattr(retry, "NUM_RETRIES", 1000)
    with pytest.raises(TimeoutError):
        await call(timeout_s=0.2).run(Script(TransientError("503")))
    with pytest.raises(TimeoutError):
        await call().run(Script(httpx.ReadTimeout("slow")))


async def test_a_cancelled_call_is_not_retried():
    script = Script(30.0)
    task = asyncio.create_task(call().run(script))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(script.times) == 1


async def test_a_retry_after_delays_the_calls_of_its_host_alone():
    web = call(calls_per_second=1000)
    script, same, other = (
        Script(TransientError("429", retry_after_s=0.4), "a"),
        Script("b"),
        Script("c"),
    )
    task = asyncio.create_task(web.run(script, "a.example"))
    await asyncio.sleep(0.05)
    await asyncio.gather(web.run(same, "a.example"), web.run(other, "b.example"), task)
    assert script.times[1] - script.times[0] == pytest.approx(0.4, abs=5e-3)
    assert same.times[0] - script.times[0] == pytest.approx(0.4, abs=5e-3)
    assert other.times[0] - script.times[0] == pytest.approx(0.05, abs=5e-3)


async def test_no_host_can_ask_for_a_longer_pause_than_a_call_may_wait():
    web = call(timeout_s=2.0)
    with pytest.raises(TransientError):
        await web.run(Script(TransientError("429", retry_after_s=600)), "a.example")
    start = now_s()
    await web.run(Script("fine"), "a.example")
    assert now_s() - start == pytest.approx(2.0, abs=1e-3)


async def test_the_pauses_of_many_hosts_are_forgotten(monkeypatch):
    monkeypatch.setattr(retry, "_MAX_PAUSED_HOSTS", 3)
    limiter = RateLimiter(0)
    for number in range(9):
        limiter.pause(number, f"{number}.example")
    assert sorted(limiter._pause_ends_s) == ["6.example", "7.example", "8.example"]


async def test_more_callers_than_starts_wait_in_turn_and_the_others_time_out():
    """A page or a policy cannot choose that a trajectory is left out."""
    web = call(timeout_s=2.0, calls_per_second=10)
    results = await asyncio.gather(
        *(web.run(Script("fine")) for _ in range(50)), return_exceptions=True
    )
    num_started = results.count("fine")
    assert num_started in (20, 21)
    assert results[:num_started] == ["fine"] * num_started
    assert all(isinstance(late, TimeoutError) for late in results[num_started:])


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for():
    script = Script(TransientError("429", retry_after_s=600), "fine")
    with pytest.raises(TransientError) as caught:
        await call(timeout_s=60).run(script)
    assert caught.value.retry_after_s == 600
    assert len(script.times) == 1


async def test_retries_are_limited_too_and_a_wait_beyond_the_timeout_is_refused():
    script = Script(TransientError("503"), TransientError("503"), "fine")
    await call(calls_per_second=4).run(script)
    assert script.times[1] - script.times[0] >= 0.249
    assert script.times[2] - script.times[1] >= 0.249
    web = call(timeout_s=0.5, calls_per_second=1)
    await web.run(Script("fine"))
    with pytest.raises(RateLimitError):
        await web.run(Script("fine"))


def status(code, **headers):
    raise_for_status(
        httpx.Response(code, headers={k.replace("_", "-"): v for k, v in headers.items()}), "it"
    )


def test_temporary_statuses_are_transient_and_others_final():
    status(200)
    status(204)
    for code in (301, 400, 401, 403, 404, 422, 501):
        with pytest.raises(HttpStatusError) as final:
            status(code)
        assert final.value.status == code
    for code in (429, 500, 502, 503, 504):
        with pytest.raises(TransientError) as passing:
            status(code)
        assert (passing.value.status, passing.value.retry_after_s) == (code, None)


def test_retry_after_is_read():
    hour = formatdate(time.time() + 3600, usegmt=True)
    for header, low, high in (("7", 7, 7), (hour, 3000, 3700), (formatdate(0, usegmt=True), 0, 0)):
        with pytest.raises(TransientError) as caught:
            status(429, retry_after=header)
        assert low <= caught.value.retry_after_s <= high


@pytest.mark.parametrize(
    "header",
    [
        *("soon", "-1", "1e9", "", "9" * 5000, "x" * 60_000, "1 2", "+5"),
        *("Mon, 99 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 +2400", "1,,,,,1"),
        *("Mon, 01 Jan 9999 99:99:99 GMT", "01 Jan 2030 00:00:00 +99999999999", ", , ,", "::::"),
    ],
)
def test_an_invalid_retry_after_is_ignored(header):
    with pytest.raises(TransientError) as caught:
        status(429, retry_after=header)
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize("header", ["9" * 64, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_retry_after_is_at_most_a_day(header):
    with pytest.raises(TransientError) as caught:
        status(429, retry_after=header)
    assert caught.value.retry_after_s == 86_400


async def test_a_body_is_read_up_to_its_limit():
    async def endless():
        while True:
            yield b"x" * 1000

    body = await read_body(httpx.Response(200, content=endless()), 10_500)
    assert body == b"x" * 11_000


async def test_starts_are_spread():
    limiter, starts = RateLimiter(50), []

    async def call():
        await limiter.acquire(10)
        starts.append(now_s())

    await asyncio.gather(*(call() for _ in range(11)))
    assert max(starts) - min(starts) == pytest.approx(0.2, abs=1e-3)


@pytest.fixture
def stopped_clock(monkeypatch):
    """The time, which a test sets, and the waits, which take none."""
    now_s, slept_s = [1000.0], []

    async def sleep(wait_s):
        slept_s.append(wait_s)

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(retry, "asyncio", SimpleNamespace(sleep=sleep))
    return now_s, slept_s


def test_starts_are_spread_over_loops_and_threads(stopped_clock):
    limiter, (_, slept_s) = RateLimiter(50), stopped_clock

    async def calls():
        for _ in range(4):
            await limiter.acquire(10)

    threads = [threading.Thread(target=lambda: asyncio.run(calls())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept_s) == pytest.approx([number / 50 for number in range(1, 12)])


async def test_a_refused_caller_takes_no_start(stopped_clock):
    now_s, slept_s = stopped_clock
    limiter = RateLimiter(1)
    await limiter.acquire(0)
    for _ in range(1000):
        with pytest.raises(RateLimitError):
            await limiter.acquire(0.5)
    now_s[0] += 0.25
    await limiter.acquire(0.75)
    assert slept_s == [0.75]

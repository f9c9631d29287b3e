"""Tools with simulated latency: its distribution, and that answers wait for it."""

import statistics
import time

import pytest

from tests.fakes import FakeTools
from tools import delayed_tools
from tools.delayed_tools import DelayedTools, latency_s

pytestmark = pytest.mark.extended


def test_latencies_have_the_documented_median_and_tail():
    drawn = sorted(latency_s(f"python {{'code': '{n}'}}") for n in range(4000))
    assert statistics.median(drawn) == pytest.approx(0.2, rel=0.1)
    assert drawn[int(0.99 * 4000)] == pytest.approx(5.0, rel=0.3)
    assert latency_s("a") == latency_s("a") != latency_s("b")


async def test_answers_are_delayed_in_forks_too(monkeypatch):
    monkeypatch.setattr(delayed_tools, "latency_s", lambda text: 60.0)
    session = DelayedTools(FakeTools(), 0.1).open_session()
    await session.create({})
    child = await session.fork()
    for opened in (session, child):
        begin = time.perf_counter()
        outcome = await opened.execute("python", {"text": "1"})
        assert time.perf_counter() - begin >= 0.1
        assert outcome.answer == "ok:1"

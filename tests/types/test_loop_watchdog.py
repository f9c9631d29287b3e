"""A watchdog measures the pauses of an event loop, and names the code that holds it."""

import asyncio
import inspect
import threading
import time

import pytest

from mega_agentrl.types import loop_watchdog
from mega_agentrl.types.loop_watchdog import LIBRARY_FOLDERS, STARVED, LoopWatchdog, find_frame


class Loop:
    """A loop that answers when it is told to."""

    def __init__(self):
        self.is_on, self.callbacks, self.asked = True, [], threading.Event()

    def is_running(self):
        return self.is_on

    def call_soon_threadsafe(self, callback):
        self.callbacks.append(callback)
        self.asked.set()


@pytest.fixture
def clock(monkeypatch):
    """The time of the watchdog, which only the test advances."""
    now = [100.0]
    monkeypatch.setattr(loop_watchdog, "time", type("", (), {"monotonic": lambda: now[0]}))
    return now


def open_watchdog(loop, reports, limit_s=0.01):
    return LoopWatchdog(
        loop, threading.current_thread(), limit_s=limit_s, report=reports, excluded_folders=()
    )


def test_longest_pause_is_that_of_the_latest_answer_since_the_last_question(clock):
    loop, reported = Loop(), threading.Event()
    with open_watchdog(loop, lambda place: reported.set()) as watchdog:
        assert loop.asked.wait(300)
        loop.asked.clear()
        clock[0] += 7.0
        assert watchdog.pop_longest_pause() == 7.0, "a pause that lasts counts"
        assert reported.wait(300)
        loop.callbacks.pop()()
        assert loop.asked.wait(300), "asked again"
        assert watchdog.pop_longest_pause() == 7.0
        assert watchdog.pop_longest_pause() == 0.0


def test_loop_that_is_not_running_does_not_stand_still(clock):
    loop, reports = Loop(), []
    with open_watchdog(loop, reports.append, limit_s=1000.0) as watchdog:
        assert loop.asked.wait(300)
        loop.is_on = False
        while watchdog._asked_at_s is not None:  # noticed at the next look
            time.sleep(0.001)
        clock[0] += 5000.0
        assert watchdog.pop_longest_pause() == 0.0
    assert not reports


def test_place_is_named_once_with_its_code():
    reported, places, finished = threading.Event(), [], []

    def report(place):
        places.append(place)
        reported.set()

    async def hold():
        await asyncio.sleep(0)
        reported.wait(300)
        return inspect.currentframe().f_code.co_firstlineno

    async def hold_again():
        ends_at = time.monotonic() + 300
        while watchdog._longest_pause_s == 0.0 and time.monotonic() < ends_at:
            await asyncio.sleep(0.001)
        finished.append(True)

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        limit = {"limit_s": 0.01, "report": report}
        with LoopWatchdog(loop, threading.current_thread(), **limit) as watchdog:
            first_line = runner.run(hold())
            runner.run(hold_again())
    assert places[0].startswith(f"{__file__}:{first_line + 2} in hold: reported.wait(300)")
    assert len(places) == len(set(places)) and finished


def test_loop_that_waits_for_events_holds_nothing():
    """Then other threads or other programs keep it from answering."""

    def look(thread):
        ends_at = time.monotonic() + 300
        while (
            frame := find_frame(thread, LIBRARY_FOLDERS)
        ) is not None and time.monotonic() < ends_at:
            time.sleep(0.001)
        return STARVED if frame is None else "its own code"

    assert asyncio.run(asyncio.to_thread(look, threading.current_thread())) is STARVED

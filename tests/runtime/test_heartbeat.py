"""Who stops is named, with what everybody was at; who only works is not."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.heartbeat import Heart, Listener, Station
from mega_agentrl.runtime.remote import DiedError
from mega_agentrl.types.doing import doing

RANK = """
import sys, time
from mega_agentrl.runtime.heartbeat import Heart, Station
from mega_agentrl.types.doing import doing
heart = Heart(Station("127.0.0.1", int(sys.argv[1]), sys.argv[2]), sys.argv[3])
with doing("update"), doing("receive", "rank 7"):
    time.sleep(60)
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_S", 3.0)
    monkeypatch.setattr(heartbeat, "OVERDUE_S", 1.0)


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()
    listener.close()


def heard(listener, *names, deadline_s=30):
    ends_at = time.monotonic() + deadline_s
    while not all(f"{name}:" in listener.described() for name in names):
        assert time.monotonic() < ends_at, listener.described()
        time.sleep(0.1)


def test_a_stopped_process_is_named_with_its_operation_and_peer(quick, listener, caplog):
    station = listener.station
    arguments = [str(station.port), station.token]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, *arguments, name])
        for name in ("rank 0", "rank 1")
    ]
    try:
        heard(listener, "rank 0", "rank 1")
        listener.check(["rank 0", "rank 1", "rank that has not begun"])
        with caplog.at_level(logging.WARNING):
            os.kill(ranks[1].pid, signal.SIGSTOP)
            start_s = time.monotonic()
            with pytest.raises(DiedError, match="rank 1 has not been heard of") as found:
                while time.monotonic() - start_s < 30:
                    listener.check(["rank 0", "rank 1"])
                    time.sleep(0.1)
        assert found.value.name == "rank 1"
        assert "receive with rank 7" in str(found.value)
        listener.check(["rank 0"])
        overdue = [one.message for one in caplog.records if "overdue: rank 0" in one.message]
        assert len(overdue) == 1, "each operation is told once"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_heart_that_stops_beating_and_a_forged_one(quick, listener):
    station = listener.station
    forged = Heart(Station(station.host, station.port, "other"), "stranger")
    heart = Heart(station, "me")
    with doing("save"):
        heard(listener, "me")
    assert "stranger" not in listener.described()
    heart.stop()
    forged.stop()
    time.sleep(4.5)
    with pytest.raises(DiedError, match="me has not been heard of"):
        listener.check(["me"])


def test_a_listener_that_slept_forgives(quick, listener):
    heart = Heart(listener.station, "me")
    heard(listener, "me")
    heart.stop()
    listener._forgive(100.0)
    listener.check(["me"])


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b'{"token": "t"}', b'{"token": "t", "name": "a", "marks": 3}']
)
def test_what_is_no_beat_is_passed_over(data):
    assert heartbeat._read(data, "t") is None

"""Who stops is named, with what everybody was at; who only works is not."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.heartbeat import Heart, Listener, Patience, Said, Station
from mega_agentrl.runtime.remote import DiedError
from mega_agentrl.types.doing import doing

RANK = """
import sys, time
from mega_agentrl.runtime.heartbeat import Heart, Station
from mega_agentrl.types.doing import doing
heart = Heart(Station("127.0.0.1", int(sys.argv[1]), sys.argv[2]), sys.argv[3])
with doing("update"), doing("receive", "rank 7", bound_s=1.0):
    time.sleep(60)
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_S", 3.0)


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
            ends_at = time.monotonic() + 120
            with pytest.raises(DiedError, match="rank 1 has not been heard of") as found:
                while time.monotonic() < ends_at:
                    listener.check(["rank 0", "rank 1"])
                    time.sleep(0.1)
        assert found.value.name == "rank 1"
        assert "receive with rank 7" in str(found.value)
        listener.check(["rank 0"])
        overdue = [one.message for one in caplog.records if "overdue: rank 0" in one.message]
        assert len(overdue) == 1, "each operation is told once"
        assert "receive with rank 7 for" in overdue[0] and "It is at: update for" in overdue[0]
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
    ends_at = time.monotonic() + 30
    with pytest.raises(DiedError, match="me has not been heard of"):
        while time.monotonic() < ends_at:
            listener.check(["me"])
            time.sleep(0.1)


def test_a_listener_that_slept_forgives(quick, listener):
    heart = Heart(listener.station, "me")
    heard(listener, "me")
    heart.stop()
    listener._forgive(100.0)
    listener.check(["me"])


def words(age_s, *, bound_s=300.0, operation="passes", peer="tensor ranks 0, 1"):
    """An update that began 100 s before the operation inside of it."""
    return [Said("update", "", age_s + 100, 1000.0), Said(operation, peer, age_s, bound_s)]


def test_every_operation_that_is_too_old_is_told_once_by_rank_operation_and_peer():
    patience = Patience()
    assert patience.overdue("rank 0", words(299.0)) == []
    assert patience.overdue("rank 0", words(301.0)) == ["passes with tensor ranks 0, 1 for 301 s"]
    assert patience.overdue("rank 1", words(302.0)) == ["passes with tensor ranks 0, 1 for 302 s"]
    assert patience.overdue("rank 0", words(500.0)) == []
    # Now the operation around it is, which waits for whom the inner one waits for.
    said = patience.overdue("rank 0", words(901.0))
    assert said == ["update with tensor ranks 0, 1 for 1001 s"]
    alone = words(301.0, operation="tokens", peer="")
    assert patience.overdue("rank 2", alone) == ["tokens with nobody else for 301 s"]


def test_what_is_slow_again_and_again_is_told_only_beyond_twice_its_age():
    patience = Patience()
    assert len(patience.overdue("rank 0", words(301.0))) == 1
    patience.overdue("rank 0", words(400.0))
    assert patience.overdue("rank 0", []) == []
    for age_s in (5.0, 301.0, 799.0):
        assert patience.overdue("rank 0", words(age_s)) == []
    assert patience.overdue("rank 0", words(801.0)) == ["passes with tensor ranks 0, 1 for 801 s"]


def test_an_operation_without_a_peer_gets_into_the_log(listener, caplog):
    heart = Heart(listener.station, "critic rank 0")
    ends_at = time.monotonic() + 30
    with caplog.at_level(logging.WARNING), doing("values", bound_s=0.5):
        while "overdue" not in caplog.text:
            assert time.monotonic() < ends_at, listener.described()
            time.sleep(0.1)
    heart.stop()
    assert "overdue: critic rank 0: values with nobody else for" in caplog.text


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b'{"token": "t"}', b'{"token": "t", "name": "a", "marks": 3}']
)
def test_what_is_no_beat_is_passed_over(data):
    assert heartbeat._read(data, "t") is None

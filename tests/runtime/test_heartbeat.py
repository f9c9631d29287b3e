"""Silent processes are named with everyone's activities; busy ones are not."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.heartbeat import ActivityReport, HeartbeatMonitor, OverdueTracker
from mega_agentrl.runtime.remote_calls import ProcessDiedError

RANK = """
import sys, time
from mega_agentrl.runtime.heartbeat import HeartbeatEndpoint, HeartbeatSender
from mega_agentrl.types.activity import track_activity
sender = HeartbeatSender(HeartbeatEndpoint("127.0.0.1", int(sys.argv[1]), sys.argv[2]), sys.argv[3])
with track_activity("update"), track_activity("receive", "rank 7", overdue_after_s=1.0):
    time.sleep(60)
"""


@pytest.fixture
def monitor():
    monitor = HeartbeatMonitor("127.0.0.1")
    yield monitor
    monitor.close()
    monitor.close()


def silence_s(monitor, name):
    with monitor._lock:
        return monitor._liveness.seconds_since_heartbeat(name)


def test_process_that_stops_after_the_startup_is_named_with_its_operation_and_peer(
    monkeypatch, monitor, caplog
):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_TIMEOUT_S", 3.0)
    endpoint = monitor.endpoint
    arguments = [str(endpoint.port), endpoint.token]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, *arguments, name])
        for name in ("rank 0", "rank 1")
    ]
    try:
        ends_at = time.monotonic() + 30
        while monitor.describe().count("rank 7") < 2:
            assert time.monotonic() < ends_at, monitor.describe()
            time.sleep(0.1)
        monitor.check(["rank 0", "rank 1", "rank that has not begun"])
        with caplog.at_level(logging.WARNING):
            os.kill(ranks[1].pid, signal.SIGSTOP)
            ends_at = time.monotonic() + 120
            while silence_s(monitor, "rank 1") <= 4:
                assert time.monotonic() < ends_at
                monitor.check(["rank 0", "rank 1"])  # it may be loading libraries
                time.sleep(0.1)
            monitor.end_startup()
            with pytest.raises(ProcessDiedError, match="rank 1 has sent no heartbeat") as found:
                while time.monotonic() < ends_at:
                    monitor.check(["rank 0", "rank 1"])
                    time.sleep(0.1)
        assert found.value.process_name == "rank 1"
        assert "receive with rank 7" in str(found.value)
        monitor.check(["rank 0"])
        overdue = [one.message for one in caplog.records if "overdue: rank 0" in one.message]
        assert len(overdue) == 1, "each operation is reported once"
        assert "receive with rank 7 for" in overdue[0] and "update for" in overdue[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def reports(age_s, *, overdue_after_s=300.0, operation="passes", peer="tensor ranks 0, 1"):
    """Return an update that began 100 s before the operation inside it."""
    return [
        ActivityReport("update", "", age_s + 100, 1000.0),
        ActivityReport(operation, peer, age_s, overdue_after_s),
    ]


def test_overdue_activity_is_reported_once_per_rank_operation_and_peer():
    tracker = OverdueTracker()
    assert tracker.newly_overdue("rank 0", reports(299.0)) == []
    for name, age_s in (("rank 0", 301.0), ("rank 1", 302.0)):
        lines = tracker.newly_overdue(name, reports(age_s))
        assert lines == [f"passes with tensor ranks 0, 1 for {age_s:.0f} s"]
    assert tracker.newly_overdue("rank 0", reports(500.0)) == []
    # The enclosing operation is overdue too; its peer is that of the inner one.
    lines = tracker.newly_overdue("rank 0", reports(901.0))
    assert lines == ["update with tensor ranks 0, 1 for 1001 s"]
    alone = reports(301.0, operation="tokens", peer="")
    assert tracker.newly_overdue("rank 2", alone) == ["tokens with nobody else for 301 s"]


def test_recurring_overdue_activity_is_reported_beyond_twice_its_age():
    tracker = OverdueTracker()
    assert len(tracker.newly_overdue("rank 0", reports(301.0))) == 1
    tracker.newly_overdue("rank 0", reports(400.0))
    assert tracker.newly_overdue("rank 0", []) == []
    for age_s in (5.0, 301.0, 799.0):
        assert tracker.newly_overdue("rank 0", reports(age_s)) == []
    assert tracker.newly_overdue("rank 0", reports(801.0)) == [
        "passes with tensor ranks 0, 1 for 801 s"
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 4096,
        b'{"token": "t"}',
        b'{"token": "t", "name": "a", "activities": 3}',
        b'{"token": "other", "name": "a", "activities": []}',
    ],
    ids=["empty", "no_text", "list", "deeply_nested", "only_token", "no_activities", "forged"],
)
def test_malformed_and_forged_heartbeats_are_ignored(data):
    assert heartbeat._decode_heartbeat(data, "t") is None

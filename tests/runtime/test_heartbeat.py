"""Silent processes are named with everyone's activities; busy ones are not."""

import json
import socket
import time

import pytest

from mega_agentrl.runtime import heartbeat
from mega_agentrl.runtime.heartbeat import (
    HEARTBEAT_TIMEOUT_S,
    STARTUP_HEARTBEAT_TIMEOUT_S,
    ActivityReport,
    HeartbeatMonitor,
    OverdueTracker,
)
from mega_agentrl.runtime.remote_calls import ProcessDiedError


class Ranks:
    """Heartbeats of several ranks, sent by the test, and the clock of their monitor."""

    def __init__(self):
        self.now_s = 0.0
        self.monitor = HeartbeatMonitor("127.0.0.1", clock=lambda: self.now_s)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def send(self, name, *activities):
        """Send the heartbeat of a rank, and wait until the monitor has recorded it."""
        endpoint = self.monitor.endpoint
        message = {"token": endpoint.token, "name": name, "activities": activities}
        self._socket.sendto(json.dumps(message).encode(), (endpoint.host, endpoint.port))
        expected, ends_at = [ActivityReport(*one) for one in activities], time.monotonic() + 300
        while self.monitor._activities.get(name) != expected:
            assert time.monotonic() < ends_at, self.monitor.describe()
            time.sleep(0.001)

    def close(self):
        self.monitor.close()
        self.monitor.close()
        self._socket.close()


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.close()


def test_silent_rank_is_named_with_its_operation_and_peer(ranks):
    """`workers/test_rank_group.py` stops a real rank."""
    names = ["rank 0", "rank 1", "rank without a heartbeat so far"]
    ranks.send("rank 0")
    ranks.send("rank 1", ("update", "", 2.0, 300.0), ("receive", "rank 7", 1.0, 300.0))

    def pass_time(seconds):
        end_s = ranks.now_s + seconds
        while ranks.now_s < end_s:
            ranks.now_s += 4.0  # a longer round would count as a pause of the driver
            ranks.send("rank 0", ("update", "", ranks.now_s, 300.0))

    pass_time(HEARTBEAT_TIMEOUT_S + 4)
    ranks.monitor.check(names)  # rank 1 may be loading libraries
    ranks.monitor.end_startup()
    with pytest.raises(ProcessDiedError) as caught:
        ranks.monitor.check(names)
    assert caught.value.process_name == "rank 1"
    assert "receive with rank 7 for 1 s" in str(caught.value)
    ranks.monitor.check(["rank 0"])


def test_silent_rank_is_lost_during_the_startup_too(ranks):
    ranks.send("rank 1")
    for number in range(int(STARTUP_HEARTBEAT_TIMEOUT_S // 4) + 1):
        ranks.monitor.check(["rank 1"])
        ranks.now_s += 4.0
        ranks.send("rank 0", ("update", "", float(number), 300.0))
    with pytest.raises(ProcessDiedError):
        ranks.monitor.check(["rank 1"])


def test_overdue_activity_is_logged_once_while_it_lasts(ranks, caplog):
    for age_s in (2.0, 3.0):
        ranks.send("rank 0", ("update", "", age_s + 1, 300.0), ("receive", "rank 7", age_s, 1.0))
    # The monitor logs after it has recorded the activities, and before the next heartbeat.
    ranks.send("rank 0")
    (message,) = [record.message for record in caplog.records]
    assert message == (
        "overdue: rank 0: receive with rank 7 for 2 s. "
        "Its activities: update for 3 s, receive with rank 7 for 2 s"
    )


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


def test_heartbeats_are_received_at_the_address_of_the_run_alone():
    """A local run has a loopback address, which other machines cannot reach."""
    monitor = HeartbeatMonitor("127.0.0.1")
    port = monitor.endpoint.port
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.2", port))  # fails if the monitor listens on every address
    finally:
        monitor.close()

"""Heartbeats of the model ranks, and detection of silent ranks and overdue operations.

A thread in each rank sends a UDP datagram every `HEARTBEAT_INTERVAL_S` with the rank's name and its
current activities (`types.activity`). A process that is stopped, or blocked in native code while
holding the interpreter lock, sends none. A thread in the driver keeps the last heartbeat of each
rank:

    no heartbeat for `HEARTBEAT_TIMEOUT_S`   the rank is lost; `HeartbeatMonitor.check` raises
                                             (pauses of the driver do not count: `types.liveness`)
                                             (before `end_startup`: `STARTUP_HEARTBEAT_TIMEOUT_S`)
    an activity older than its limit         a warning in `logs/driver.log` (`OverdueTracker`)

A token distinguishes them from the heartbeats of other runs and of earlier processes of a rank.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mega_agentrl.runtime.remote_calls import ProcessDiedError
from mega_agentrl.types.activity import current_activities
from mega_agentrl.types.liveness import LivenessTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 15.0
"""Silence in seconds after which a rank is lost; working code never holds the GIL for so long."""
STARTUP_HEARTBEAT_TIMEOUT_S = 180.0
"""Silence in seconds after which a starting rank is lost: loading libraries from a slow disk, and
creating the first CUDA context on a node without persistence mode, may hold the GIL for longer."""

_MAX_DATAGRAM_BYTES = 4096
_logger = logging.getLogger(__name__)


class ActivityReport(NamedTuple):
    """An activity in a heartbeat, with an age instead of a time because clocks differ."""

    operation: str
    """Name of the operation."""
    peer: str
    """Process or rank that the operation waits for; empty for none."""
    age_s: float
    """Seconds since the start of the operation."""
    overdue_after_s: float
    """Age in seconds from which the operation is overdue."""


@dataclass(frozen=True, slots=True)
class HeartbeatEndpoint:
    """Address that heartbeats are sent to."""

    host: str
    """IP address of the driver."""
    port: int
    """UDP port."""
    token: str
    """Secret that every heartbeat must carry."""


class HeartbeatSender:
    """Sends heartbeats of this process from construction on."""

    def __init__(self, endpoint: HeartbeatEndpoint, name: str) -> None:
        self._endpoint = endpoint
        self._name = name
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        address = (self._endpoint.host, self._endpoint.port)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            while True:
                try:
                    sock.sendto(self._encode_heartbeat(), address)
                except OSError as error:  # a network failure: the next heartbeat may get through
                    _logger.debug("heartbeat of %s not sent: %s", self._name, error)
                time.sleep(HEARTBEAT_INTERVAL_S)

    def _encode_heartbeat(self) -> bytes:
        now = time.monotonic()
        activities = [
            ActivityReport(
                activity.operation,
                activity.peer,
                round(now - activity.started_at_s, 1),
                activity.overdue_after_s,
            )
            for activity in current_activities()
        ]
        message = {"token": self._endpoint.token, "name": self._name, "activities": activities}
        return json.dumps(message).encode()


class OverdueTracker:
    """Decides which overdue activities to report, each once while it lasts.

    An activity that was reported and has ended is reported again only beyond twice its earlier age,
    so that an operation which is always slow is not reported every time, but one that hangs is.
    """

    def __init__(self) -> None:
        self._reported_age_s: dict[tuple[str, str, str], float] = {}
        self._finished_age_s: dict[tuple[str, str, str], float] = {}

    def newly_overdue(self, name: str, activities: Sequence[ActivityReport]) -> list[str]:
        """Return a line with operation, peer and seconds for each activity to report."""
        ages = {
            (name, activity.operation, activity.peer): activity.age_s for activity in activities
        }
        for key, age_s in list(self._reported_age_s.items()):
            if key[0] == name and ages.get(key, 0.0) < age_s:
                self._finished_age_s[key] = self._reported_age_s.pop(key)
        lines = []
        for position, activity in enumerate(activities):
            key = (name, activity.operation, activity.peer)
            is_reported = key in self._reported_age_s
            limit_s = max(activity.overdue_after_s, 2 * self._finished_age_s.get(key, 0.0))
            if not is_reported and activity.age_s <= limit_s:
                continue
            self._reported_age_s[key] = activity.age_s
            if not is_reported:
                peer = next(
                    (inner.peer for inner in activities[position:] if inner.peer), "nobody else"
                )
                lines.append(f"{activity.operation} with {peer} for {activity.age_s:.0f} s")
        return lines


class HeartbeatMonitor:
    """Receives the heartbeats in the driver, from construction until `close`.

    The ranks are starting until `end_startup` is called.
    """

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the socket, on this address alone, and start the listener thread.

        Args:
            host: The driver's IP address as seen from the nodes of the run; a loopback address if
                all ranks are on this machine.
            clock: Returns the time in seconds.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.settimeout(HEARTBEAT_INTERVAL_S)
        self.endpoint = HeartbeatEndpoint(host, self._socket.getsockname()[1], secrets.token_hex(8))
        self._lock = threading.Lock()
        self._is_starting = True
        self._liveness = LivenessTracker[str](clock=clock)
        self._activities: dict[str, list[ActivityReport]] = {}
        self._overdue_tracker = OverdueTracker()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeats", daemon=True)
        self._thread.start()

    def end_startup(self) -> None:
        """Expect heartbeats within `HEARTBEAT_TIMEOUT_S` from now on, because all ranks run."""
        self._is_starting = False

    def check(self, names: Collection[str]) -> None:
        """Raise `ProcessDiedError` if one of these ranks has stopped sending heartbeats."""
        with self._lock:
            silence_s, name = max(
                ((self._liveness.seconds_since_heartbeat(name), name) for name in names),
                default=(0.0, ""),
            )
        timeout_s = STARTUP_HEARTBEAT_TIMEOUT_S if self._is_starting else HEARTBEAT_TIMEOUT_S
        if silence_s > timeout_s:
            raise ProcessDiedError(
                f"{name} has sent no heartbeat for {silence_s:.0f} s; probable cause: its process "
                "is stopped or blocked in native code, or its node is gone. Last activities: "
                f"{self.describe()}",
                name,
            )

    def describe(self) -> str:
        """Return the last known activities of all ranks as one line."""
        with self._lock:
            lines = [
                f"{name}: {_format_activities(activities)} "
                f"({self._liveness.seconds_since_heartbeat(name):.0f} s ago)"
                for name, activities in sorted(self._activities.items())
            ]
        return "; ".join(lines) or "none"

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._stop_event.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._stop_event.is_set():
            try:
                data: bytes | None = self._socket.recv(_MAX_DATAGRAM_BYTES)
            except TimeoutError:
                data = None
            with self._lock:
                self._liveness.begin_round()
            if data is not None:
                self._record_heartbeat(data)

    def _record_heartbeat(self, data: bytes) -> None:
        message = _decode_heartbeat(data, self.endpoint.token)
        if message is None:
            return
        name, activities = message
        with self._lock:
            self._liveness.record_heartbeat(name)
            self._activities[name] = activities
        for line in self._overdue_tracker.newly_overdue(name, activities):
            _logger.warning(
                "overdue: %s: %s. Its activities: %s", name, line, _format_activities(activities)
            )


def _decode_heartbeat(data: bytes, token: str) -> tuple[str, list[ActivityReport]] | None:
    """Return the sender's name and activities; None for anything but a heartbeat of this run."""
    try:
        message: Any = json.loads(data)
        if message["token"] != token:
            return None
        activities = [
            ActivityReport(str(a), str(b), float(c), float(d))
            for a, b, c, d in message["activities"]
        ]
        return str(message["name"]), activities
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _format_activities(activities: list[ActivityReport]) -> str:
    if not activities:
        return "idle"
    return ", ".join(
        f"{operation}{f' with {peer}' if peer else ''} for {age_s:.0f} s"
        for operation, peer, age_s, _ in activities
    )

"""The state of every engine of a run, and the callers that wait for an engine that serves.

    routable -> lost -> new -> routable     or: lost too often -> abandoned

`GeneratorGroup` records losses here, and `EngineSupervisor` waits for them. The sets of engines
change only under `condition`, which is notified of losses, of starts and of the end.
`notify_waiters` must follow `enable_routing`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mega_agentrl.runtime.remote_calls import NoEngineLeftError, PolicyRankDiedError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ENGINE_RESTARTS = 3
"""Number of losses, without serving in between, after which an engine is abandoned."""


class EngineRegistry:
    """Knows which engines serve, lack weights, are lost or abandoned."""

    def __init__(self, num_engines: int) -> None:
        """Create a registry in which all engines are routable."""
        self.condition = threading.Condition()
        self.routable: set[int] = set(range(num_engines))
        """Engines that get requests."""
        self.new_engines: set[int] = set()
        """Engines that run but lack the weights."""
        self.lost_reasons: dict[int, str] = {}
        """Reason of each loss whose engine has no replacement yet."""
        self.num_replaced = 0
        """Number of engines replaced so far."""
        self.num_abandoned = 0
        """Number of abandoned engines."""
        self.policy_error: str | None = None
        """Error of a lost policy rank, because of which new engines get no weights."""
        self.is_closed = False
        self._end_reason = "the run is ending"
        self._abandoned_reasons: dict[int, str] = {}
        self._num_losses: Counter[int] = Counter()
        self._waiters: list[Future[None]] = []

    @property
    def live_engines(self) -> list[int]:
        """Indices of all engines that run, with or without weights."""
        return sorted(self.new_engines | self.routable)

    @property
    def num_handled_losses(self) -> int:
        """Number of losses so far whose engine was replaced or abandoned."""
        return self.num_replaced + self.num_abandoned

    def enable_routing(self, engines: Iterable[int]) -> None:
        """Let engines get requests, except those that were lost meanwhile."""
        with self.condition:
            unusable = self.lost_reasons.keys() | self._abandoned_reasons.keys()
            self.routable |= set(engines) - unusable

    def disable_routing(self, index: int) -> None:
        """Send an engine no more requests."""
        with self.condition:
            self.routable.discard(index)

    def mark_lost(self, index: int, reason: str) -> bool:
        """Record a loss; return False if the engine is lost already or the registry is closed."""
        with self.condition:
            if self.is_closed or index in self.lost_reasons or index in self._abandoned_reasons:
                return False
            self.lost_reasons[index] = reason
            self.new_engines.discard(index)
            self.routable.discard(index)
            self.condition.notify_all()
            return True

    def count_restart(self, index: int) -> bool:
        """Count a restart of a lost engine; return False if it was abandoned instead."""
        with self.condition:
            self._num_losses[index] += 1
            if self._num_losses[index] <= MAX_ENGINE_RESTARTS:
                return True
            self._abandoned_reasons[index] = (
                f"engine {index} was lost {MAX_ENGINE_RESTARTS} times: "
                f"{self.lost_reasons.pop(index)}"
            )
            self.num_abandoned += 1
        self.notify_waiters()
        return False

    def mark_started(self, index: int) -> None:
        """Record that the replacement of a lost engine runs."""
        with self.condition:
            self.lost_reasons.pop(index)
            self.new_engines.add(index)
            self.num_replaced += 1
            self.condition.notify_all()

    def notify_waiters(self) -> None:
        """Wake all waiting callers, because an engine is routable or none ever will be."""
        with self.condition:
            self.new_engines -= self.routable
            for index in self.routable:
                self._num_losses[index] = 0
            if not self.new_engines:
                self.policy_error = None
            waiters, self._waiters = self._waiters, []
            self.condition.notify_all()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    async def wait_for_engine(self) -> None:
        """Wait until an engine accepts requests.

        Raises:
            NoEngineLeftError: No engine will ever accept requests.
            PolicyRankDiedError: No engine will accept requests until the policy is restarted.
        """
        while not self.routable:
            with self.condition:
                if self.routable:
                    return
                if self.policy_error is not None:
                    raise PolicyRankDiedError(f"no engine has weights: {self.policy_error}")
                if self.is_closed or not (self.lost_reasons or self.new_engines):
                    raise NoEngineLeftError(self._abandoned_reasons, self._end_reason)
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            await asyncio.wrap_future(waiter)

    def close(self, reason: str = "the run is ending") -> None:
        """Fail all waiting callers and record no more losses; keeps the first reason."""
        if not self.is_closed:
            self._end_reason = reason
        self.is_closed = True
        self.notify_waiters()

"""Supervise the rollout engines: health checks, replacement, weights for the new ones.

One thread sends every engine a health check (`Engine.check_health`, which goes through vLLM's core)
each `_CHECK_INTERVAL_S`. An engine is lost if it reports that it is dead, if its process is gone,
or if it does not answer for `ENGINE_TIMEOUT_S`. Callers that notice a death first call
`report_lost`. Then

    lost -> new process starts -> new engine -> has the served weights -> gets requests

A new engine waits for the next `WeightSynchronizer.sync` if the policy has been updated meanwhile,
or if a policy rank is lost. In the second case, if no other engine is left, all waiting requests
fail with that error, because perhaps nothing else would use the policy and notice. An engine that
is lost more than `_MAX_ENGINE_RESTARTS` times before it ever served is abandoned; with the last
one, all waiting requests fail.

The thread waits for the policy lock and for engine starts, which have timeouts. On GPUs shared with
the policy it also waits until the policy is offloaded (`gpu_time_sharing`), and kills a lost engine
at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from mega_agentrl.runtime.remote_calls import PolicyRankDiedError, RemoteCallError
from mega_agentrl.types.errors import EngineLostError

if TYPE_CHECKING:
    from mega_agentrl.runtime.weight_sync import WeightSynchronizer
    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.gpu_time_sharing import GpuTimeSharing

ENGINE_TIMEOUT_S = 20.0
"""Time in seconds without an answer after which an engine is lost."""
_CHECK_INTERVAL_S = 1.0
_SUPERVISOR_PAUSE_S = 5.0
"""If the supervisor thread itself did not run for this long, the silence of engines proves nothing.
"""

_MAX_ENGINE_RESTARTS = 3
_SUPERVISOR_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class EngineSupervisor:
    """Supervises all engines of a run; call `start` once they serve."""

    def __init__(
        self,
        engines: GeneratorGroup,
        weight_sync: WeightSynchronizer,
        *,
        gpu_time_sharing: GpuTimeSharing | None = None,
    ) -> None:
        self.new_engines: set[int] = set()
        """Engines that run but lack the weights."""
        self.num_replaced = 0
        """Number of engines replaced so far."""
        self._engines = engines
        self._weight_sync = weight_sync
        self._gpu_time_sharing = gpu_time_sharing
        self._lock = threading.Condition()
        self._stop_event = threading.Event()
        self._lost_reasons: dict[int, str] = {}
        self._abandoned_reasons: dict[int, str] = {}
        self._policy_error: str | None = None
        self._num_losses: Counter[int] = Counter()
        self._pending_health_checks: dict[int, tuple[Any, float]] = {}
        self._waiters: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Start the supervisor thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop supervising and wake all waiting callers; safe to call twice."""
        self._stop_event.set()
        self.notify_waiters()
        if self._thread.is_alive():
            self._thread.join(_SUPERVISOR_CLOSE_TIMEOUT_S)

    def report_lost(self, index: int, actor: Any, reason: str) -> None:
        """Report that an engine's process is dead or unusable; does nothing if it was replaced."""
        with self._lock:
            if self._engines.actor(index) is not actor or self._stop_event.is_set():
                return
            if index in self._lost_reasons or index in self._abandoned_reasons:
                return
            _logger.warning("engine %d is lost and replaced: %s", index, reason)
            self._lost_reasons[index] = reason
            self.new_engines.discard(index)
            self._engines.disable_routing(index)
            if self._gpu_time_sharing is not None:
                # Its memory must be free before the replacement starts.
                ray.kill(actor, no_restart=True)
            self._lock.notify_all()

    @property
    def is_replacing(self) -> bool:
        """Whether some engine is lost and not replaced yet."""
        return bool(self._lost_reasons)

    async def wait_for_engine(self) -> None:
        """Wait until some engine accepts requests.

        Raises:
            RemoteCallError: no engine ever will.
            PolicyRankDiedError: no engine will before the policy is restarted.
        """
        while not self._engines.routable_engines:
            with self._lock:
                if self._policy_error is not None:
                    raise PolicyRankDiedError(f"no engine has weights: {self._policy_error}")
                if self._stop_event.is_set() or not (self._lost_reasons or self.new_engines):
                    reason = "; ".join(self._abandoned_reasons.values()) or "the run is ending"
                    raise RemoteCallError(f"no engine is left: {reason}")
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            if self._engines.routable_engines:
                return
            await asyncio.wrap_future(waiter)

    def replace_lost_engines(self) -> bool:
        """Check all engines and wait until lost ones are replaced.

        The caller must hold the policy lock. The replacements are in `new_engines` afterwards.

        Returns:
            Whether an engine was replaced or abandoned and at least one is left.
        """
        with self._lock:
            before = self.num_replaced + len(self._abandoned_reasons)
            pending = bool(self._lost_reasons)
        self._check_health(wait_s=ENGINE_TIMEOUT_S)
        with self._lock:
            pending = pending or bool(self._lost_reasons)
            self._lock.wait_for(lambda: not self._lost_reasons or self._stop_event.is_set())
            changed = pending or self.num_replaced + len(self._abandoned_reasons) > before
            return changed and bool(self.new_engines or self._engines.routable_engines)

    def notify_waiters(self) -> None:
        """Wake all waiting callers, after an engine became routable or none ever will."""
        with self._lock:
            self.new_engines.difference_update(self._engines.routable_engines)
            for index in self._engines.routable_engines:
                self._num_losses[index] = 0
            if not self.new_engines:
                self._policy_error = None
            waiting, self._waiters = self._waiters, []
            self._lock.notify_all()
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stop_event.is_set():
            with self._lock:
                self._lock.wait_for(
                    lambda: bool(self._lost_reasons) or self._stop_event.is_set(), _CHECK_INTERVAL_S
                )
                lost = sorted(self._lost_reasons)
            now = time.monotonic()
            if now - before_s > _SUPERVISOR_PAUSE_S:
                self._pending_health_checks.clear()
            for index in lost:
                if not self._stop_event.is_set():
                    self._replace(index)
            if not self._stop_event.is_set():
                self._sync_new_engines()
                self._check_health()
            before_s = time.monotonic()

    def _check_health(self, wait_s: float = 0.0) -> None:
        """Send health checks to all engines that should be alive and handle the answers."""
        ends_at = time.monotonic() + wait_s
        for index in sorted(self.new_engines.union(self._engines.routable_engines)):
            actor = self._engines.actor(index)
            call, sent_at_s = self._pending_health_checks.pop(index, (None, 0.0))
            if call is None or wait_s:  # an old answer proves nothing
                call, sent_at_s = actor.call.remote("check_health"), time.monotonic()
            left_s = max(0.0, min(ends_at, sent_at_s + ENGINE_TIMEOUT_S) - time.monotonic())
            ready, _ = ray.wait([call], timeout=left_s)
            if not ready:
                silent_s = time.monotonic() - sent_at_s
                if silent_s >= ENGINE_TIMEOUT_S:
                    reason = f"it accepts requests but has not answered for {silent_s:.0f} s"
                    self.report_lost(index, actor, reason)
                else:
                    self._pending_health_checks[index] = (call, sent_at_s)
                continue
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                self.report_lost(index, actor, f"its process died; see logs/engine{index}.log")
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, EngineLostError):
                    self.report_lost(index, actor, str(error.cause))

    def _replace(self, index: int) -> None:
        self._pending_health_checks.pop(index, None)
        self._num_losses[index] += 1
        if self._num_losses[index] > _MAX_ENGINE_RESTARTS:
            self._abandon(index, self._lost_reasons[index])
            return
        try:
            with (
                nullcontext()
                if self._gpu_time_sharing is None
                else self._gpu_time_sharing.reserve_for_engine_start()
            ):
                _, starting = self._engines.respawn_engine(index)
                self._engines.wait_started(starting)
        except RemoteCallError as error:
            _logger.warning("engine %d could not be restarted: %s", index, error)
            return  # still lost: it is tried again
        with self._lock:
            self._lost_reasons.pop(index)
            self.new_engines.add(index)
            self.num_replaced += 1
            self._lock.notify_all()

    def _abandon(self, index: int, reason: str) -> None:
        with self._lock:
            self._abandoned_reasons[index] = (
                f"engine {index} was lost {_MAX_ENGINE_RESTARTS} times: {reason}"
            )
            self._lost_reasons.pop(index)
        self.notify_waiters()

    def _sync_new_engines(self) -> None:
        """Send the weights to new engines, unless the policy has been updated meanwhile."""
        for index in sorted(self.new_engines):
            if index in self._engines.routable_engines:
                continue  # it was synced together with another engine
            actor = self._engines.actor(index)
            try:
                is_synced = self._weight_sync.sync_new_engines([index])
            except PolicyRankDiedError as error:
                if self._policy_error is None:
                    _logger.warning("engine %d waits for a new policy: %s", index, error)
                    self._policy_error = str(error)
                continue
            except (RuntimeError, ValueError) as error:
                self.report_lost(index, actor, f"the weights could not be sent to it: {error}")
                continue
            self._policy_error = None
            if is_synced and index in self.new_engines:
                self._engines.enable_routing(index)
                _logger.warning("engine %d serves again with the current weights", index)
        self.notify_waiters()

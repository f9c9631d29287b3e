"""Supervise the rollout engines: health checks, replacement, weights for the new ones.

A thread sends every engine a health check (`Engine.check_health`, which goes through vLLM's core)
each `_CHECK_INTERVAL_S`. An engine is lost if it reports that it is dead, if its process is gone,
or if it does not answer for `engine.stuck_timeout_s`, not counting pauses of the thread
(`types.liveness`). Callers that notice a death first report it to the `GeneratorGroup`. Then

    lost -> new process starts -> new engine -> has the served weights -> gets requests

A new engine waits for the next weight sync if the policy has been updated meanwhile, or if a policy
rank is lost. In the second case, if no other engine is left, all waiting requests fail with that
error, because no other call may reach the policy and reveal it. An engine that is lost too often
before it ever served is abandoned; when none is left, all waiting requests fail.

The thread waits for the weights of new engines and for engine starts, which have timeouts; while an
engine starts, it checks the others. On GPUs shared with the policy it also waits until the policy
is offloaded (`reserve_gpus`). If the thread itself fails, all waiting requests fail.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from mega_agentrl.runtime.remote_calls import (
    DEATH_ERRORS,
    PolicyRankDiedError,
    RemoteCallError,
    describe_death,
)
from mega_agentrl.types.errors import EngineLostError
from mega_agentrl.types.liveness import LivenessTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup

_CHECK_INTERVAL_S = 1.0
_SUPERVISOR_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class _HealthChecks:
    """Health checks of one thread, with at most one pending per engine."""

    def __init__(self, engines: GeneratorGroup) -> None:
        self._engines = engines
        self._liveness = LivenessTracker[int]()
        self.pending: dict[int, tuple[Any, Any]] = {}
        """Actor and call of each pending check, by engine."""

    def send(self) -> None:
        """Send a check to every live engine whose process has none pending."""
        self._liveness.begin_round()
        for index in self._engines.registry.live_engines:
            actor = self._engines.actor(index)
            pending_actor, _ = self.pending.get(index, (None, None))
            if pending_actor is not actor:
                self.pending[index] = (actor, actor.call.remote("check_health"))
                self._liveness.record_heartbeat(index)  # silence begins with the check

    def handle_answers(self, wait_s: float = 0.0) -> None:
        """Wait for answers at most `wait_s`, and report engines that are dead or silent."""
        calls = [call for _, call in self.pending.values()]
        ready = ray.wait(calls, num_returns=len(calls), timeout=wait_s)[0] if calls else []
        self._liveness.begin_round()
        for index, (actor, call) in list(self.pending.items()):
            if call in ready:
                reason = _death_reason(index, call)
            elif (
                silence_s := self._liveness.seconds_since_heartbeat(index)
            ) > self._engines.stuck_limit_s(index):
                reason = f"it accepts requests but has not answered for {silence_s:.0f} s"
            else:
                continue
            del self.pending[index]
            if reason:
                self._engines.report_lost(index, actor, reason)


def _death_reason(index: int, answered_check: Any) -> str:
    """Return how an engine died according to its answer; empty if it lives."""
    try:
        ray.get(answered_check)
    except DEATH_ERRORS as error:
        return f"{describe_death(f'engine {index}', error)} (logs/engine{index}.log)"
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EngineLostError):
            return str(error.cause)
    return ""


class EngineSupervisor:
    """Supervises all engines of a run; call `start` once they serve."""

    def __init__(
        self,
        engines: GeneratorGroup,
        sync_new_engines: Callable[[Sequence[int]], bool],
        reserve_gpus: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Create a supervisor that is not running.

        Args:
            engines: The supervised engines.
            sync_new_engines: Sends the served weights to engines; returns False if they have to
                wait.
            reserve_gpus: Keeps the policy off the engines' GPUs during the start of an engine.
        """
        self._engines = engines
        self._registry = engines.registry
        self._send_weights = sync_new_engines
        self._reserve_gpus = reserve_gpus
        self._checks = _HealthChecks(engines)
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Start the supervisor thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop supervising and wake all waiting callers; safe to call twice."""
        self._registry.close()
        if self._thread.is_alive():
            self._thread.join(_SUPERVISOR_CLOSE_TIMEOUT_S)

    def replace_lost_engines(self, num_handled_losses: int) -> bool:
        """Check all engines and wait until lost ones are replaced.

        The caller must keep `sync_new_engines` from blocking. The replacements are among the
        registry's `new_engines` afterwards.

        Args:
            num_handled_losses: The registry's value when the caller began to use the engines.

        Returns:
            Whether an engine was replaced or abandoned since then and at least one is left; False
            if the supervisor does not run.
        """
        if not self._thread.is_alive():
            return False
        registry = self._registry
        checks = _HealthChecks(self._engines)  # an earlier check says nothing about the present
        checks.send()
        while checks.pending:
            checks.handle_answers(wait_s=_CHECK_INTERVAL_S)
        with registry.condition:
            registry.condition.wait_for(lambda: not registry.lost_reasons or registry.is_closed)
            has_changed = registry.num_handled_losses > num_handled_losses
            return has_changed and bool(registry.live_engines)

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception:
            if self._registry.is_closed:
                return  # the engines were closed while one was being replaced
            _logger.exception("the engine supervisor failed")
            self._registry.close("the engine supervisor failed; see logs/driver.log")

    def _supervise(self) -> None:
        registry = self._registry
        while not registry.is_closed:
            with registry.condition:
                registry.condition.wait_for(
                    lambda: bool(registry.lost_reasons) or registry.is_closed, _CHECK_INTERVAL_S
                )
                lost_engines = sorted(registry.lost_reasons)
            for index in lost_engines:
                if not registry.is_closed:
                    self._replace(index)
            if not registry.is_closed:
                self._sync_new_engines()
                self._check_health()

    def _check_health(self) -> None:
        self._checks.handle_answers()
        self._checks.send()

    def _replace(self, index: int) -> None:
        if not self._registry.count_restart(index):
            return
        try:
            with self._reserve_gpus():
                start = self._engines.respawn_engine(index)
                self._engines.wait_started(start, watch=self._check_health)
        except RemoteCallError as error:
            _logger.warning("engine %d could not be restarted: %s", index, error)
            return  # it remains lost, so the next round tries again
        self._registry.mark_started(index)

    def _sync_new_engines(self) -> None:
        """Send the weights to new engines, unless the policy has been updated meanwhile."""
        registry = self._registry
        for index in sorted(registry.new_engines):
            if index in registry.routable:
                continue  # it was synced together with another engine
            actor = self._engines.actor(index)
            try:
                is_synced = self._send_weights([index])
            except PolicyRankDiedError as error:
                if registry.policy_error is None:
                    _logger.warning("engine %d waits for a new policy: %s", index, error)
                    registry.policy_error = str(error)
                continue
            except (RuntimeError, ValueError) as error:
                reason = f"the weights could not be sent to it: {error}"
                self._engines.report_lost(index, actor, reason)
                continue
            registry.policy_error = None
            if is_synced and index in registry.new_engines:
                self._engines.enable_routing(index)
                _logger.warning("engine %d serves again with the current weights", index)
        registry.notify_waiters()

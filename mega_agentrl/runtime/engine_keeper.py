"""Keeps the engines alive: takes their pulse, replaces what died or hangs, brings it the weights.

One thread. Each `_TICK_S` it asks every engine for a sign of life (`Engine.pulse`, which goes
through vLLM's core); an engine is lost when it says that it is dead, when its process is gone,
and when it is silent for `SILENCE_S`. Whoever notices a death first may say so (`lost`). Then

    lost -> a new process starts -> fresh -> it has the weights that are served -> admitted

A fresh engine waits for the next `send` where the policy has gone on meanwhile, and where a rank of
it is lost: with no other engine left, everybody who waits gets that error then, as nobody else may
be asking the policy for anything. An engine that is
lost `_MAX_LOSSES` times before it was admitted once is given up; with the last one everybody who
waits gets the error. Waits for the policy's turn and for starts, which have deadlines; on GPUs that
the policy shares also until it is off them (`turns`), and a lost engine is ended at once then.
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

from mega_agentrl.runtime.remote import RankGoneError, RemoteError
from mega_agentrl.types.faults import EngineLostError

if TYPE_CHECKING:
    from mega_agentrl.runtime.bridge import WeightBridge
    from mega_agentrl.runtime.generator_group import GeneratorGroup
    from mega_agentrl.runtime.turns import Turns

SILENCE_S = 20.0
_TICK_S = 1.0
_NAP_S = 5.0
"""A thread that did not run for so long cannot say that engines were silent meanwhile."""

_MAX_LOSSES = 3
_CLOSE_DEADLINE_S = 5.0
_logger = logging.getLogger(__name__)


class EngineKeeper:
    """Of all engines of a run; `start` once they serve.

    fresh: engines that run and lack the weights. num_replaced: how many were lost so far.
    """

    def __init__(
        self,
        engines: GeneratorGroup,
        bridge: WeightBridge,
        *,
        turns: Turns | None = None,
    ) -> None:
        self.fresh: set[int] = set()
        self.num_replaced = 0
        self._engines = engines
        self._bridge = bridge
        self._turns = turns
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._lost: dict[int, str] = {}
        self._given_up: dict[int, str] = {}
        self._without_policy: str | None = None
        self._num_losses: Counter[int] = Counter()
        self._pulses: dict[int, tuple[Any, float]] = {}
        self._waiting: list[Future[None]] = []
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)

    def start(self) -> None:
        """Begin to take the pulse."""
        self._thread.start()

    def close(self) -> None:
        """Let engines die from here on; ends what it was at. Safe to call twice."""
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_DEADLINE_S)

    def lost(self, index: int, actor: Any, why: str) -> None:
        """An engine's process was found dead or useless; old news are passed over."""
        with self._lock:
            if self._engines.actor(index) is not actor or self._closing.is_set():
                return
            if index in self._lost or index in self._given_up:
                return
            _logger.warning("engine %d is lost and replaced: %s", index, why)
            self._lost[index] = why
            self.fresh.discard(index)
            self._engines.dismiss(index)
            if self._turns is not None:
                ray.kill(actor, no_restart=True)  # its memory is needed before its successor is
            self._lock.notify_all()

    @property
    def is_replacing(self) -> bool:
        """Whether some engine is lost and its successor not there yet."""
        return bool(self._lost)

    async def wait_for_any(self) -> None:
        """Until some engine gets requests; raises `RemoteError` where none ever will, and
        `RankGoneError` where none will before the policy is made anew.
        """
        while not self._engines.admitted:
            with self._lock:
                if self._without_policy is not None:
                    raise RankGoneError(f"no engine has weights: {self._without_policy}")
                if self._closing.is_set() or not (self._lost or self.fresh):
                    why = "; ".join(self._given_up.values()) or "the run is ending"
                    raise RemoteError(f"no engine is left: {why}")
                waiter: Future[None] = Future()
                self._waiting.append(waiter)
            if self._engines.admitted:
                return
            await asyncio.wrap_future(waiter)

    def mend(self) -> bool:
        """Find out who is lost and wait until they are replaced; False where nobody was.

        For whoever has the policy's turn: the new engines are `fresh` then.
        """
        with self._lock:
            before = self.num_replaced + len(self._given_up)
            pending = bool(self._lost)
        self._look(wait_s=SILENCE_S)
        with self._lock:
            pending = pending or bool(self._lost)
            self._lock.wait_for(lambda: not self._lost or self._closing.is_set())
            changed = pending or self.num_replaced + len(self._given_up) > before
            return changed and bool(self.fresh or self._engines.admitted)

    def wake(self) -> None:
        """Look again, all who wait: some engine was admitted, or none will be."""
        with self._lock:
            self.fresh.difference_update(self._engines.admitted)
            for index in self._engines.admitted:
                self._num_losses[index] = 0
            if not self.fresh:
                self._without_policy = None
            waiting, self._waiting = self._waiting, []
            self._lock.notify_all()
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _keep(self) -> None:
        before_s = time.monotonic()
        while not self._closing.is_set():
            with self._lock:
                self._lock.wait_for(lambda: bool(self._lost) or self._closing.is_set(), _TICK_S)
                lost = sorted(self._lost)
            now = time.monotonic()
            if now - before_s > _NAP_S:
                self._pulses.clear()
            for index in lost:
                if not self._closing.is_set():
                    self._replace(index)
            if not self._closing.is_set():
                self._welcome()
                self._look()
            before_s = time.monotonic()

    def _look(self, wait_s: float = 0.0) -> None:
        """Take the pulse of all that should be alive."""
        ends_at = time.monotonic() + wait_s
        for index in sorted(self.fresh.union(self._engines.admitted)):
            actor = self._engines.actor(index)
            sent, since_s = self._pulses.pop(index, (None, 0.0))
            if sent is None or wait_s:  # an old answer says nothing of now
                sent, since_s = actor.call.remote("pulse"), time.monotonic()
            left_s = max(0.0, min(ends_at, since_s + SILENCE_S) - time.monotonic())
            ready, _ = ray.wait([sent], timeout=left_s)
            if not ready:
                silent_s = time.monotonic() - since_s
                if silent_s >= SILENCE_S:
                    why = f"it takes requests and has not answered for {silent_s:.0f} s"
                    self.lost(index, actor, why)
                else:
                    self._pulses[index] = (sent, since_s)
                continue
            try:
                ray.get(sent)
            except ray.exceptions.RayActorError:
                self.lost(index, actor, f"its process died; see logs/engine{index}.log")
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, EngineLostError):
                    self.lost(index, actor, str(error.cause))

    def _replace(self, index: int) -> None:
        self._pulses.pop(index, None)
        self._num_losses[index] += 1
        if self._num_losses[index] > _MAX_LOSSES:
            self._give_up(index, self._lost[index])
            return
        try:
            with nullcontext() if self._turns is None else self._turns.start_of_engine():
                _, starting = self._engines.begin_replace(index)
                self._engines.finish_start(starting)
        except RemoteError as error:
            _logger.warning("engine %d did not come back: %s", index, error)
            return  # still lost: once more
        with self._lock:
            self._lost.pop(index)
            self.fresh.add(index)
            self.num_replaced += 1
            self._lock.notify_all()

    def _give_up(self, index: int, why: str) -> None:
        with self._lock:
            self._given_up[index] = f"engine {index} was lost {_MAX_LOSSES} times: {why}"
            self._lost.pop(index)
        self.wake()

    def _welcome(self) -> None:
        """Bring the weights into fresh engines, unless the policy has gone on."""
        for index in sorted(self.fresh):
            if index in self._engines.admitted:
                continue  # it got them with another one
            actor = self._engines.actor(index)
            try:
                welcomed = self._bridge.welcome([index])
            except RankGoneError as error:
                if self._without_policy is None:
                    _logger.warning("engine %d waits for a new policy: %s", index, error)
                    self._without_policy = str(error)
                continue
            except (RuntimeError, ValueError) as error:
                self.lost(index, actor, f"it could not be given the weights: {error}")
                continue
            self._without_policy = None
            if welcomed and index in self.fresh:
                self._engines.admit(index)
                _logger.warning("engine %d is back with the weights that are served", index)
        self.wake()

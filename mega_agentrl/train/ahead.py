"""Who waits for whom: the rollouts of coming steps while a step learns.

With k = `rollout.staleness` the collection of step t may begin once t - 1 - k updates were sent.
Step t learns after t - 1 updates, so no token is older than k versions then, whatever is slow:
what would become older has not begun, and nothing is dropped. Up to k steps are collected at once,
in order.

    k = 0   collect t | learn t | send | collect t + 1 | ...
    k = 1   learn t beside collect t + 1; the update waits for it before it is sent, so that
            every step is of one version (one-step-off)
    k > 1   collections go on while weights are sent: running requests are ended, and continued
            behind the tokens they have, which keep their version (`rollout.hold`)

`take` waits for a collection; unblocked by its end, by its failure, which it raises, and by
cancellation. `wait_before_send` waits for engines, tools and rewards; unblocked by them, by a
signal, which ends the collections, and where no engine serves, as a new one gets its weights with
those that are to be sent.
`close` cancels what is under way and waits until its tools are free.

Everything here is called in the main thread and done on the event loop, which with k > 0 has a
thread of its own (`Parts.wait`). The prompts of a step are settled when it is taken, so that until
then a checkpoint gives them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.rollout.hold import HeldGenerator
from mega_agentrl.rollout.scoring import forget
from mega_agentrl.train.phases import collect_groups, open_groups, step_name

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.rollout.groups import GroupCollector
    from mega_agentrl.train.safekeeping import Safekeeping
    from mega_agentrl.train.stopping import Stopper
    from mega_agentrl.types.parts import Parts

HOLD_S = 2.0
"""How long running requests get to end before weights are sent; the engine waits for the rest."""

POLL_S = 0.05


class Rollouts(Protocol):
    """Where the loop's steps get what they learn from."""

    def take(self, step: int) -> Collected:
        """The groups of a step; each step once, in order. Its learning begins now."""

    def wait_before_send(self) -> None:
        """The update of the step is made; returns when its weights may be sent."""

    def sent(self, step: int) -> None:
        """The engines serve what this step's update gave."""


class InStep:
    """Collected when they are asked for, with the weights that the step updates."""

    def __init__(self, parts: Parts, groups: GroupCollector) -> None:
        self._parts = parts
        self._groups = groups

    def take(self, step: int) -> Collected:
        """See `Rollouts`."""
        return collect_groups(self._parts, self._groups, step)

    def wait_before_send(self) -> None:
        """See `Rollouts`."""

    def sent(self, step: int) -> None:
        """See `Rollouts`."""


@contextmanager
def open_rollouts(
    parts: Parts, config: TrainConfig, kept: Safekeeping, stopper: Stopper
) -> Iterator[Rollouts]:
    """The rollouts of all steps that are left; ends those that nobody took."""
    staleness = config.rollout.staleness
    held = HeldGenerator(parts.generator, parts.codec) if staleness > 1 else None
    with open_groups(parts, config, kept.trees, held) as groups:
        if not staleness:
            yield InStep(parts, groups)
            return
        ahead = Ahead(
            parts,
            groups,
            stopper,
            staleness=staleness,
            num_done=kept.step,
            num_steps=config.total_steps,
            held=held,
        )
        try:
            yield ahead
        finally:
            ahead.close()


class Ahead:
    """Collected up to `staleness` updates ahead.

    num_done: RL steps made. num_steps: of the whole run. held: the engine of `groups`, where
    staleness is above 1.
    """

    def __init__(
        self,
        parts: Parts,
        groups: GroupCollector,
        stopper: Stopper,
        *,
        staleness: int,
        num_done: int,
        num_steps: int,
        held: HeldGenerator | None,
    ) -> None:
        self._parts = parts
        self._groups = groups
        self._stopper = stopper
        self._staleness = staleness
        self._num_sent = num_done
        self._next = num_done + 1
        self._num_steps = num_steps
        self._held = held
        self._tasks: dict[int, asyncio.Task[Collected]] = {}
        self._is_over = False

    def take(self, step: int) -> Collected:
        """See `Rollouts`."""
        return self._parts.wait(self._take(step))

    def wait_before_send(self) -> None:
        """See `Rollouts`."""
        self._parts.wait(self._finish() if self._held is None else self._hold(self._held))

    def sent(self, step: int) -> None:
        """See `Rollouts`."""
        self._parts.wait(self._go_on(step))

    def close(self) -> None:
        """End all collections; safe to call twice."""
        self._parts.wait(self._end())

    async def _take(self, step: int) -> Collected:
        self._begin()
        task = self._tasks[step]
        await asyncio.wait({task})
        del self._tasks[step]
        collected = task.result()
        self._groups.settle(collected)
        # Its tokens are as old as they are now, when the step begins.
        return replace(collected, version=self._parts.generator.version)

    def _begin(self, ended: asyncio.Task[Collected] | None = None) -> None:
        """Begin what may begin; ended: the collection whose end is the cause."""
        if ended is not None and (ended.cancelled() or ended.exception() is not None):
            self._is_over = True
        last = min(self._num_steps, self._num_sent + 1 + self._staleness)
        while not self._is_over and self._next <= last and self._num_open() < self._staleness:
            num_behind = self._next - 1 - self._num_sent
            collecting = self._groups.collect_early(
                step_name(self._next), max_age=self._staleness - num_behind
            )
            task = asyncio.create_task(collecting, name=f"step {self._next}")
            self._tasks[self._next] = task
            self._next += 1
            task.add_done_callback(self._begin)

    def _num_open(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    async def _finish(self) -> None:
        """Wait for what is being collected; end it where the run is to end."""
        while self._num_open() and self._stopper.asked is None and self._can_serve():
            open_tasks = [task for task in self._tasks.values() if not task.done()]
            await asyncio.wait(open_tasks, timeout=POLL_S)
        if self._stopper.asked is not None:
            # Who saves has little time, and the engines end requests before they take weights.
            await self._end()

    def _can_serve(self) -> bool:
        return self._parts.generator.can_serve

    async def _hold(self, held: HeldGenerator) -> None:
        """Bring running requests to rest. Once is not enough: some may be on their way."""
        try:
            async with asyncio.timeout(HOLD_S):
                await held.hold()
                while held.is_running:
                    await asyncio.sleep(POLL_S)
                    await held.hold()
        except TimeoutError:
            pass

    async def _go_on(self, step: int) -> None:
        self._num_sent = step
        if self._held is not None:
            self._held.go_on()
        if self._stopper.asked is None:
            self._begin()

    async def _end(self) -> None:
        self._is_over = True
        tasks = list(self._tasks.values())
        self._tasks = {}
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                forget(result.pending)

"""Schedule rollouts relative to training: synchronous, one step off, or further ahead.

With k = `rollout.max_staleness`, the collection for step t may start once t - 1 - k updates have
been synced to the engines. Step t trains after t - 1 updates, so no token is more than k versions
old, however slow any part is: rollouts that would become older are not started, and nothing is
dropped. Up to k steps are collected at once, in order.

    k = 0   collect t | train t | sync | collect t + 1 | ...
    k = 1   train t while t + 1 is collected; the sync waits for the collection, so that every
            step is sampled with one version (one-step-off)
    k > 1   collections continue during a sync: running requests are interrupted and continued
            after their last tokens, which keep their version (`rollout.generation.interruptible`)

With `weight_sync.in_flight` and any k > 0, the sync neither waits for collections nor interrupts
their requests: the engines hold them and go on with the new weights (`generator.engine`).

`collect` waits until a collection ends, fails (the error is raised) or is cancelled.
`wait_before_weight_sync` waits for engines, tools and rewards. It returns early at a signal, which
ends the collections, and if no engine can serve, because a restarted engine gets its weights with
the next sync. `close` cancels the running collections and waits until their tools are released.

All methods are called from the main thread and run on the event loop, which for k > 0 has a thread
of its own (`Components.run_coroutine`). The prompts of a step are acknowledged when the step is
collected; until then a checkpoint returns them to the sampler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.rollout.context import make_rollout_context
from mega_agentrl.rollout.generation.interruptible import InterruptibleGenerator
from mega_agentrl.rollout.groups.batch_collector import RolloutCollector
from mega_agentrl.rollout.groups.scoring import cancel_scores

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
    from mega_agentrl.rollout.io.tree_store import TreeStore
    from mega_agentrl.train.signals import SignalHandler
    from mega_agentrl.types.components import Components
    from mega_agentrl.types.protocols import Generator

INTERRUPT_TIMEOUT_S = 2.0
"""Seconds for running requests to stop before a weight sync; the engine waits for the others."""

POLL_INTERVAL_S = 0.05


class RolloutScheduler(Protocol):
    """Provides the rollouts of each step."""

    def collect(self, step: int) -> RolloutBatch:
        """Return the groups of a step. Call it once per step, in order, when the step begins."""

    def wait_before_weight_sync(self) -> None:
        """Return when the updated weights may be sent to the engines."""

    def on_weights_synced(self, step: int) -> None:
        """Continue after the engines have received the weights of this step's update."""


@contextmanager
def open_rollout_scheduler(
    components: Components,
    config: TrainConfig,
    signal_handler: SignalHandler,
    *,
    num_done: int = 0,
    tree_store: TreeStore | None = None,
) -> Iterator[RolloutScheduler]:
    """Yield the scheduler of the steps after `num_done`; cancel unused rollouts on exit."""
    staleness, in_flight = config.rollout.max_staleness, config.weight_sync.in_flight
    interruptible_generator = (
        InterruptibleGenerator(components.generator, components.codec)
        if staleness > 1 and not in_flight
        else None
    )
    with open_rollout_collector(
        components, config, tree_store, interruptible_generator
    ) as collector:
        if not staleness:
            yield SyncRolloutScheduler(components, collector)
            return
        scheduler = AsyncRolloutScheduler(
            components,
            collector,
            signal_handler,
            staleness=staleness,
            num_done=num_done,
            num_steps=config.total_steps,
            interruptible_generator=interruptible_generator,
            in_flight=in_flight,
        )
        try:
            yield scheduler
        finally:
            scheduler.close()


@contextmanager
def open_rollout_collector(
    components: Components,
    config: TrainConfig,
    tree_store: TreeStore | None = None,
    generator: Generator | None = None,
) -> Iterator[RolloutCollector]:
    """Yield the collector of the training groups; cancel carried-over groups on exit.

    Args:
        components: The components of the run.
        config: Settings of the run.
        tree_store: Keeps finished trees until a checkpoint includes them.
        generator: Used in place of `components.generator`.
    """
    context = make_rollout_context(
        generator=generator or components.generator,
        tools=components.tools,
        codec=components.codec,
        interactions=components.interactions,
        config=config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step="train",
        spans=components.monitors.rollout_spans,
        with_greedy=config.algo.estimator.needs_greedy_baseline,
        with_routes=config.replays_sampled_routes,
        tree_store=tree_store,
        images=components.images,
        agents=components.agents,
    )
    collector = RolloutCollector(
        components.prompt_source,
        context,
        components.rubric,
        num_groups=config.data.prompts_per_step,
    )
    try:
        yield collector
    finally:
        components.run_coroutine(collector.close())


def rollout_stream_name(step: int) -> str:
    """Return the key of a step's random streams, and of its trees in the store."""
    return f"train-{step}"


class SyncRolloutScheduler:
    """Collects rollouts on demand, with the weights that the step updates."""

    def __init__(self, components: Components, collector: RolloutCollector) -> None:
        self._components = components
        self._collector = collector

    def collect(self, step: int) -> RolloutBatch:
        """Collect the groups of the step now.

        Scores that are computed elsewhere may still be pending (`RolloutBatch.pending_scores`).
        """
        return self._components.run_coroutine(self._collector.collect(rollout_stream_name(step)))

    def wait_before_weight_sync(self) -> None:
        """Return immediately: nothing is being collected."""

    def on_weights_synced(self, step: int) -> None:
        """Do nothing: the next collection starts when it is asked for."""


class AsyncRolloutScheduler:
    """Collects rollouts up to `staleness` updates ahead of training."""

    def __init__(
        self,
        components: Components,
        collector: RolloutCollector,
        signal_handler: SignalHandler,
        *,
        staleness: int,
        num_done: int,
        num_steps: int,
        interruptible_generator: InterruptibleGenerator | None,
        in_flight: bool = False,
    ) -> None:
        """Schedule the steps after `num_done`, the number of finished RL steps, up to `num_steps`.

        `interruptible_generator` is the generator of `collector` if requests are interrupted before
        a sync; with `in_flight` nothing has to be done before it.
        """
        self._components = components
        self._collector = collector
        self._signal_handler = signal_handler
        self._max_staleness = staleness
        self._num_synced_steps = num_done
        self._next_step = num_done + 1
        self._num_steps = num_steps
        self._interruptible_generator = interruptible_generator
        self._in_flight = in_flight
        self._tasks: dict[int, asyncio.Task[RolloutBatch]] = {}
        self._is_stopped = False

    def collect(self, step: int) -> RolloutBatch:
        """Return the groups of the step when their collection has finished."""
        return self._components.run_coroutine(self._collect(step))

    def wait_before_weight_sync(self) -> None:
        """Wait for the running collections, or interrupt their requests, unless in flight."""
        if self._in_flight:
            return
        self._components.run_coroutine(
            self._wait_for_collections()
            if self._interruptible_generator is None
            else self._interrupt_requests(self._interruptible_generator)
        )

    def on_weights_synced(self, step: int) -> None:
        """Continue interrupted requests and start further collections."""
        self._components.run_coroutine(self._resume_after_sync(step))

    def close(self) -> None:
        """Cancel all collections; may be called twice."""
        self._components.run_coroutine(self._cancel_collections())

    async def _collect(self, step: int) -> RolloutBatch:
        self._start_collections()
        task = self._tasks[step]
        await asyncio.wait({task})
        del self._tasks[step]
        rollout_batch = task.result()
        self._collector.ack(rollout_batch)
        # The age of the tokens is measured from here, the start of the step.
        return replace(rollout_batch, version=self._components.generator.version)

    def _start_collections(self, ended: asyncio.Task[RolloutBatch] | None = None) -> None:
        """Start all permitted collections; `ended` is a collection whose end triggers the call."""
        if ended is not None and (ended.cancelled() or ended.exception() is not None):
            self._is_stopped = True
        last_permitted = min(self._num_steps, self._num_synced_steps + 1 + self._max_staleness)
        while (
            not self._is_stopped
            and self._next_step <= last_permitted
            and self._num_running() < self._max_staleness
        ):
            num_ahead = self._next_step - 1 - self._num_synced_steps
            collecting = self._collector.collect_unacked(
                rollout_stream_name(self._next_step),
                max_version_lag=self._max_staleness - num_ahead,
            )
            task = asyncio.create_task(collecting, name=f"step {self._next_step}")
            self._tasks[self._next_step] = task
            self._next_step += 1
            task.add_done_callback(self._start_collections)

    def _num_running(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    async def _wait_for_collections(self) -> None:
        """Wait for the running collections; cancel them if the run has received a signal."""
        while (
            self._num_running()
            and self._signal_handler.received_signal is None
            and self._any_engine_serving()
        ):
            open_tasks = [task for task in self._tasks.values() if not task.done()]
            await asyncio.wait(open_tasks, timeout=POLL_INTERVAL_S)
        if self._signal_handler.received_signal is not None:
            # The time to save is short, and engines end requests before they take weights.
            await self._cancel_collections()

    def _any_engine_serving(self) -> bool:
        return self._components.generator.can_serve

    async def _interrupt_requests(self, interruptible_generator: InterruptibleGenerator) -> None:
        """Interrupt running requests until none is left.

        This is repeated, because requests may be on their way to the engine.
        """
        try:
            async with asyncio.timeout(INTERRUPT_TIMEOUT_S):
                await interruptible_generator.interrupt_requests()
                while interruptible_generator.has_running_requests:
                    await asyncio.sleep(POLL_INTERVAL_S)
                    await interruptible_generator.interrupt_requests()
        except TimeoutError:
            pass

    async def _resume_after_sync(self, step: int) -> None:
        self._num_synced_steps = step
        if self._interruptible_generator is not None:
            self._interruptible_generator.continue_requests()
        if self._signal_handler.received_signal is None:
            self._start_collections()

    async def _cancel_collections(self) -> None:
        self._is_stopped = True
        tasks = list(self._tasks.values())
        self._tasks = {}
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                cancel_scores(result.pending_scores)

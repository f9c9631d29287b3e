"""Groups: the running trajectories of a prompt, as a task that may outlive a step.

With a filter (`filter.filter_group`) a group finishes when all of its scores are known; otherwise
`pending_scores` lists those that are still being computed. With `rollout.partial_rollout` a group
can be paused: it is paused when all of its open trajectories wait for the engine, so that no
request, tool or user is running. A group with a busy tool or reward cannot pause.

With `RolloutContext.with_greedy` a group also gets a greedy trajectory, which ReMax uses as the
baseline of the group. It runs concurrently with the group, with the same engines, tools and limits,
at temperature 0 and without branching, and is stored as `RolloutTree.greedy_trajectory`. It is
scored like every trajectory, but never trained on and not part of the group's statistics. If it
fails, ReMax (`train.estimators.group_relative`) uses the mean of the group's other trajectories as
the baseline; the metric `rollout/greedy_failed` is the share of such groups.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.rollout.branching.lockstep_arpo import LockstepArpoRollout
from mega_agentrl.rollout.branching.policy import NoBranching
from mega_agentrl.rollout.collector import unwrap_exception_group
from mega_agentrl.rollout.generation.interruptible import InterruptibleGenerator
from mega_agentrl.rollout.groups.filter import FilterResult, filter_group
from mega_agentrl.rollout.groups.scoring import (
    PendingScore,
    cancel_scores,
    start_scores,
    wait_for_scores,
)
from mega_agentrl.rollout.tree import sample_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.protocols import Rubric
    from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory

PAUSE_TIMEOUT_S = 2.0
"""Time for groups to pause; groups with tools that take longer are dropped."""

POLL_INTERVAL_S = 0.02
"""Interval between attempts to interrupt the requests of a group."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The running or finished trajectories of one prompt."""

    prompt: Prompt
    task: asyncio.Task[RolloutTree]
    """Samples and scores the tree."""
    lockstep_task: asyncio.Task[list[RolloutTree]] | None = None
    """Task shared by all groups that advance in lock-step."""
    generator: InterruptibleGenerator | None = None
    """The group's generator, if the group can be paused."""
    trajectory_tasks: list[asyncio.Task[Trajectory | None]] = field(default_factory=list)
    """Tasks of the trajectories that have started."""
    greedy_tasks: list[asyncio.Task[Trajectory | None]] = field(default_factory=list)
    """Task of the greedy trajectory, once it has started."""
    pending_scores: list[PendingScore] = field(default_factory=list)
    """Scores that are still being computed when the group has finished."""
    filter_result: FilterResult | None = None
    """None until the group has finished."""
    num_steps_carried: int = 0
    """Number of times that the group was carried over to a next step."""
    is_restored: bool = False
    """Whether the tree comes from the tree store."""

    @property
    def tree(self) -> RolloutTree:
        """The tree of a finished group; raises the exception that ended it."""
        try:
            return self.task.result()
        except ExceptionGroup as errors:
            raise unwrap_exception_group(errors) from None

    @property
    def is_accepted(self) -> bool:
        """Whether the group has finished and is trained on."""
        return self.filter_result is FilterResult.accepted

    @property
    def is_paused(self) -> bool:
        """Whether the group is unfinished and nothing of it is running."""
        num_open = sum(not task.done() for task in (*self.trajectory_tasks, *self.greedy_tasks))
        return self.generator is not None and 0 < num_open == self.generator.num_waiting

    def apply_filter(self, context: RolloutContext) -> None:
        """Apply the filter to the finished tree."""
        self.filter_result = filter_group(self.tree, context.config)

    async def pause(self) -> None:
        """Interrupt requests until the group is paused or has finished."""
        assert self.generator is not None, "only groups with an interruptible generator can pause"
        while not (self.task.done() or self.is_paused):
            # Repeated, because a request may be on its way to the engine.
            await self.generator.interrupt_requests()
            await asyncio.sleep(POLL_INTERVAL_S)

    def resume(self) -> None:
        """Continue after `pause`."""
        if self.generator is not None:
            self.generator.continue_requests()


def start_group(context: RolloutContext, prompt: Prompt, key: str, rubric: Rubric) -> Group:
    """Start the trajectories of a prompt; with `rollout.partial_rollout` the group can pause."""
    generator = None
    if context.config.partial_rollout:
        generator = InterruptibleGenerator(context.generator, context.codec)
        context = replace(context, generator=generator)
    trajectory_tasks: list[asyncio.Task[Trajectory | None]] = []
    greedy_tasks: list[asyncio.Task[Trajectory | None]] = []
    pending: list[PendingScore] = []
    restored = _restore_tree(context, prompt, key)

    async def sample() -> RolloutTree:
        tree = restored
        if tree is None:
            async with asyncio.TaskGroup() as task_group:
                greedy_task = None
                if context.with_greedy:
                    greedy_task = task_group.create_task(
                        _sample_greedy_trajectory(context, prompt, key, greedy_tasks)
                    )
                tree = await sample_tree(context, prompt, key, trajectory_tasks)
            tree.greedy_trajectory = None if greedy_task is None else greedy_task.result()
            _store_tree(context, key, tree)
        return await _score_tree(tree, rubric, context, pending)

    return Group(
        prompt=prompt,
        task=asyncio.create_task(sample(), name=f"group {key}"),
        generator=generator,
        trajectory_tasks=trajectory_tasks,
        greedy_tasks=greedy_tasks,
        pending_scores=pending,
        is_restored=restored is not None,
    )


async def _sample_greedy_trajectory(
    context: RolloutContext,
    prompt: Prompt,
    prompt_key: str,
    tasks: list[asyncio.Task[Trajectory | None]],
) -> Trajectory:
    """Sample the greedy trajectory of a prompt, unscored; `tasks` receives its task."""
    greedy_context = replace(
        context,
        config=replace(context.config, group_size=1, top_p=1.0, top_k=0),
        policy=NoBranching(),
        temperature=0.0,
        step=f"{context.step}-greedy",
        with_greedy=False,
        with_routes=False,
    )
    tree = await sample_tree(greedy_context, prompt, prompt_key, tasks)
    return tree.trajectories[0]


def start_lockstep_groups(
    context: RolloutContext, prompts: Sequence[Prompt], keys: Sequence[str], rubric: Rubric
) -> list[Group]:
    """Start prompts that advance in lock-step: their groups finish and are cancelled together."""
    restored = [
        _restore_tree(context, prompt, key) for prompt, key in zip(prompts, keys, strict=True)
    ]
    is_restored = all(tree is not None for tree in restored)

    async def run() -> list[RolloutTree]:
        if is_restored:
            return [tree for tree in restored if tree is not None]
        trees = await LockstepArpoRollout(context, prompts, keys).run()
        for key, tree in zip(keys, trees, strict=True):
            _store_tree(context, key, tree)
        return trees

    lockstep_task = asyncio.create_task(run())

    def start(index: int, prompt: Prompt) -> Group:
        pending: list[PendingScore] = []

        async def score() -> RolloutTree:
            return await _score_tree((await lockstep_task)[index], rubric, context, pending)

        return Group(
            prompt=prompt,
            task=asyncio.create_task(score()),
            lockstep_task=lockstep_task,
            pending_scores=pending,
            is_restored=is_restored,
        )

    return [start(index, prompt) for index, prompt in enumerate(prompts)]


def _restore_tree(context: RolloutContext, prompt: Prompt, key: str) -> RolloutTree | None:
    if context.tree_store is None:
        return None
    served = context.generator.version
    return context.tree_store.get(
        str(context.step), key, prompt, oldest=served - context.max_version_lag, newest=served
    )


def _store_tree(context: RolloutContext, key: str, tree: RolloutTree) -> None:
    if context.tree_store is not None:
        context.tree_store.put(str(context.step), key, context.generator.version, tree)


async def _score_tree(
    tree: RolloutTree, rubric: Rubric, context: RolloutContext, pending: list[PendingScore]
) -> RolloutTree:
    """Start the tree's scores, and wait for them if there is a filter; else add to `pending`."""
    missing = start_scores(tree, rubric, context.spans)
    if context.config.filter_metric is FilterMetric.none:
        pending += missing
    else:
        await wait_for_scores(missing)
    return tree


async def pause_groups(groups: Iterable[Group]) -> None:
    """Pause groups; those not paused within `PAUSE_TIMEOUT_S` are left as they are."""
    try:
        async with asyncio.timeout(PAUSE_TIMEOUT_S):
            await asyncio.gather(*(group.pause() for group in groups))
    except TimeoutError:
        pass


async def cancel_groups(groups: Iterable[Group]) -> Exception | None:
    """Cancel groups and their scores, and wait until their tools are free.

    Returns:
        The first exception that had ended one of the groups before, or None.
    """
    groups = list(groups)
    tasks = [
        task for group in groups for task in (group.task, group.lockstep_task) if task is not None
    ]
    for task in tasks:
        task.cancel()
    cancel_scores(score for group in groups for score in group.pending_scores)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            return unwrap_exception_group(result) if isinstance(result, ExceptionGroup) else result
    return None

"""One group: the trajectories of a prompt while they grow, as a task that may outlive a step.

Consumes a prompt, produces its tree. Where a filter judges it by its scores (`filter.judge`), it
has finished when they are all there; else scores that others work on may still be missing, and
`pending` says which. A group that was started so that it can be held rests
when every one of its trajectories waits for the engine: no request, tool or user is running then,
and it may lie as long as it must. A tool or a reward that is busy keeps its group from resting.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.rollout.collector import first_error
from mega_agentrl.rollout.filter import Verdict, judge
from mega_agentrl.rollout.greedy import greedy_answer
from mega_agentrl.rollout.hold import HeldGenerator
from mega_agentrl.rollout.released import ReleasedBatch
from mega_agentrl.rollout.scoring import PendingScore, forget, start_scores, wait_for
from mega_agentrl.rollout.tree import grow_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.rollout.trajectory import RolloutContext
    from mega_agentrl.types.ports import Rubric
    from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory

HOLD_S = 2.0
"""How long groups get to come to rest: tools that take longer lose theirs."""

POLL_S = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group and where it stands. verdict: None before it has finished.

    rounds: the common task of groups that go in lock-step. generator: its way to the engine where
    it can be held. trajectories: the tasks of those that have started. greedy: of the greedy
    answer. pending: the scores that are missing once it has finished. num_carried: steps that it
    was carried over from. is_reused: its tree was kept from before a crash.
    """

    prompt: Prompt
    task: asyncio.Task[RolloutTree]
    rounds: asyncio.Task[list[RolloutTree]] | None = None
    generator: HeldGenerator | None = None
    trajectories: list[asyncio.Task[Trajectory]] = field(default_factory=list)
    greedy: list[asyncio.Task[Trajectory]] = field(default_factory=list)
    pending: list[PendingScore] = field(default_factory=list)
    verdict: Verdict | None = None
    num_carried: int = 0
    is_reused: bool = False

    @property
    def tree(self) -> RolloutTree:
        """The tree of a finished group; raises the bug that ended it."""
        try:
            return self.task.result()
        except ExceptionGroup as errors:
            raise first_error(errors) from None

    @property
    def kept(self) -> bool:
        """Whether it has finished and is trained on."""
        return self.verdict is Verdict.kept

    @property
    def rests(self) -> bool:
        """Whether nothing of it is running, though it has not finished."""
        num_open = sum(not task.done() for task in (*self.trajectories, *self.greedy))
        return self.generator is not None and 0 < num_open == self.generator.num_waiting

    def finish(self, context: RolloutContext) -> None:
        """Note the verdict on the finished tree."""
        self.verdict = judge(self.tree, context.config)

    async def hold(self) -> None:
        """Bring it to rest, or to its end."""
        assert self.generator is not None, "it was not started so that it can be held"
        while not (self.task.done() or self.rests):
            # Once is not enough: a request may have been on its way to the engine.
            await self.generator.hold()
            await asyncio.sleep(POLL_S)

    def go_on(self) -> None:
        """Continue after `hold`."""
        if self.generator is not None:
            self.generator.go_on()


def start_group(context: RolloutContext, prompt: Prompt, key: str, rubric: Rubric) -> Group:
    """Start a prompt's trajectories; it can be held under `rollout.carry_over`."""
    generator = None
    if context.config.carry_over:
        generator = HeldGenerator(context.generator, context.codec)
        context = replace(context, generator=generator)
    trajectories: list[asyncio.Task[Trajectory]] = []
    greedy: list[asyncio.Task[Trajectory]] = []
    pending: list[PendingScore] = []
    kept = _kept(context, prompt, key)

    async def grow() -> RolloutTree:
        tree = kept
        if tree is None:
            async with asyncio.TaskGroup() as both:
                answer = None
                if context.with_greedy:
                    answer = both.create_task(greedy_answer(context, prompt, key, greedy))
                tree = await grow_tree(context, prompt, key, trajectories)
            tree.greedy = None if answer is None else answer.result()
            _keep(context, key, tree)
        return await _scored(tree, rubric, context, pending)

    return Group(
        prompt=prompt,
        task=asyncio.create_task(grow(), name=f"group {key}"),
        generator=generator,
        trajectories=trajectories,
        greedy=greedy,
        pending=pending,
        is_reused=kept is not None,
    )


def start_rounds(
    context: RolloutContext, prompts: Sequence[Prompt], keys: Sequence[str], rubric: Rubric
) -> list[Group]:
    """Start prompts that go in lock-step: their groups finish, and end, together."""
    kept = [_kept(context, prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    is_reused = all(tree is not None for tree in kept)

    async def run() -> list[RolloutTree]:
        if is_reused:
            return [tree for tree in kept if tree is not None]
        trees = await ReleasedBatch(context, prompts, keys).run()
        for key, tree in zip(keys, trees, strict=True):
            _keep(context, key, tree)
        return trees

    rounds = asyncio.create_task(run())

    def start(index: int, prompt: Prompt) -> Group:
        pending: list[PendingScore] = []

        async def one() -> RolloutTree:
            return await _scored((await rounds)[index], rubric, context, pending)

        task = asyncio.create_task(one())
        return Group(prompt=prompt, task=task, rounds=rounds, pending=pending, is_reused=is_reused)

    return [start(index, prompt) for index, prompt in enumerate(prompts)]


def _kept(context: RolloutContext, prompt: Prompt, key: str) -> RolloutTree | None:
    if context.store is None:
        return None
    served = context.generator.version
    return context.store.find(
        str(context.step), key, prompt, oldest=served - context.max_age, newest=served
    )


def _keep(context: RolloutContext, key: str, tree: RolloutTree) -> None:
    if context.store is not None:
        context.store.put(str(context.step), key, context.generator.version, tree)


async def _scored(
    tree: RolloutTree, rubric: Rubric, context: RolloutContext, pending: list[PendingScore]
) -> RolloutTree:
    """Start the tree's scores; those that nobody waits for go to `pending`."""
    missing = start_scores(tree, rubric, context.spans)
    if context.config.filter_key is FilterKey.none:
        pending += missing
    else:
        await wait_for(missing)
    return tree


async def hold_groups(groups: Iterable[Group]) -> None:
    """Bring groups to rest; those that do not get there within `HOLD_S` are left as they are."""
    try:
        async with asyncio.timeout(HOLD_S):
            await asyncio.gather(*(group.hold() for group in groups))
    except TimeoutError:
        pass


async def end_groups(groups: Iterable[Group]) -> Exception | None:
    """Cancel groups and wait until their tools are free; gives the first bug that had ended one.

    Their scores are forgotten.
    """
    groups = list(groups)
    tasks = [task for group in groups for task in (group.task, group.rounds) if task is not None]
    for task in tasks:
        task.cancel()
    forget(one for group in groups for one in group.pending)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            return first_error(result) if isinstance(result, ExceptionGroup) else result
    return None

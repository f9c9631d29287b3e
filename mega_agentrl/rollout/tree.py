"""The rollout tree of one prompt: its roots, their forks, and the top-up to M trajectories.

Consumes a prompt, produces a `RolloutTree` of exactly M trajectories in path order. Waits for
every trajectory: roots and forks run at once (where the policy monitors a first root, when that
one has ended), fresh roots for unused fork slots start together when those have ended. A
trajectory that fails is one of the M. A bug in one, or cancellation, ends the others, and every
tool session is released before it goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching import Share, root_budgets
from mega_agentrl.rollout.trajectory import RolloutContext, TrajectoryRun
from mega_agentrl.types.records import RolloutTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.branching import ForkBudget
    from mega_agentrl.types.records import Prompt, Trajectory


async def grow_tree(
    context: RolloutContext,
    prompt: Prompt,
    prompt_key: str,
    tasks: list[asyncio.Task[Trajectory]] | None = None,
) -> RolloutTree:
    """All M trajectories of the prompt, unscored. tasks: gets each one's task as it starts."""
    num_trajectories = context.config.num_trajectories
    tree = _Tree(context, prompt, prompt_key, [] if tasks is None else tasks)
    policy, monitored = context.policy, None
    try:
        if policy.monitors(num_trajectories):
            await tree.run_roots([Share(0)])
            monitored = tree.tasks[0].result()
        slots = policy.fork_slots(num_trajectories, monitored)
        await tree.run_roots(root_budgets(context.config.branch.budget, slots))
        num_missing = num_trajectories - len(tree.tasks)
        await tree.run_roots([Share(0)] * num_missing)
    finally:
        for run in tree.runs:
            # A task that is cancelled before its first step never reaches its own release.
            await run.release()
    trajectories = [task.result() for task in tree.tasks]
    assert len(trajectories) == num_trajectories, f"{len(trajectories)} of {num_trajectories}"
    return RolloutTree(
        prompt=prompt,
        trajectories=sorted(trajectories, key=lambda trajectory: trajectory.path),
        num_forks=sum(trajectory.parent_id is not None for trajectory in trajectories),
        num_top_ups=num_missing,
    )


class _Tree:
    """The runs of one prompt and their tasks, in the order they were started."""

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        tasks: list[asyncio.Task[Trajectory]],
    ) -> None:
        self.runs: list[TrajectoryRun] = []
        self.tasks = tasks
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._num_roots = 0

    async def run_roots(self, budgets: Sequence[ForkBudget]) -> None:
        """Run a fresh root per budget, and all their forks, to the end."""
        async with asyncio.TaskGroup() as group:

            def start(run: TrajectoryRun) -> None:
                self.runs.append(run)
                self.tasks.append(group.create_task(run.run()))

            for budget in budgets:
                root = TrajectoryRun(
                    self._context,
                    self._prompt,
                    self._prompt_key,
                    (self._num_roots,),
                    slots=budget,
                    on_fork=start,
                )
                self._num_roots += 1
                start(root)

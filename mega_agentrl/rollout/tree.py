"""Sampling of the rollout tree of one prompt: roots, forks, and extra roots up to M trajectories.

Roots and their forks run concurrently; if the branch policy monitors a first root, the others
start when it has ended. When all have ended, the policy may start forks from them, in rounds;
unused fork slots are filled with fresh roots. A failed trajectory counts as one of the M. A bug or
a cancellation ends all trajectories, and every tool session is released before the exception
propagates. With `rollout.agent` each trajectory is an attempt of the agent (`agents.runner`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mega_agentrl.rollout.agents.runner import AgentTrajectoryRunner, set_fork_lengths
from mega_agentrl.rollout.branching.policy import PathBudget, make_root_budgets, split_evenly
from mega_agentrl.rollout.trajectory import TrajectoryRunner
from mega_agentrl.types.records import RolloutTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.branching.policy import ForkBudget
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.records import Prompt, Trajectory

    Runner = TrajectoryRunner | AgentTrajectoryRunner


async def sample_tree(
    context: RolloutContext,
    prompt: Prompt,
    prompt_key: str,
    tasks: list[asyncio.Task[Trajectory | None]] | None = None,
) -> RolloutTree:
    """Sample the M = `rollout.group_size` trajectories of a prompt, unscored, in path order.

    `prompt_key` names the prompt uniquely in the pass. `tasks` receives the task of each trajectory
    when it starts.
    """
    num_trajectories = context.config.group_size
    tree = _TreeSampler(context, prompt, prompt_key, [] if tasks is None else tasks)
    policy, monitored = context.policy, None
    try:
        if policy.needs_monitor_root(num_trajectories):
            await tree.run_roots([PathBudget(0)])
            monitored = tree.trajectories[0]
        slots = policy.fork_slots(num_trajectories, monitored)
        await tree.run_roots(make_root_budgets(context.config.branch.fork_budget, slots))
        num_planned = len(slots) + (monitored is not None)
        num_left = num_trajectories - len(tree.trajectories)
        if policy.num_expansion_rounds:
            for num_forks in split_evenly(num_left, policy.num_expansion_rounds):
                await tree.expand(num_forks)
        num_missing = num_trajectories - len(tree.trajectories)
        await tree.run_roots([PathBudget(0)] * num_missing)
    finally:
        for runner in tree.runners:
            # A task that is cancelled before its first step never reaches its own release.
            await runner.release()
            await runner.release_turn_starts()
    trajectories = tree.trajectories
    runners = [item for item in tree.runners if isinstance(item, AgentTrajectoryRunner)]
    if runners:
        set_fork_lengths(trajectories, runners)
    num_forks = sum(trajectory.parent_id is not None for trajectory in trajectories)
    assert len(trajectories) == num_trajectories, f"{len(trajectories)} of {num_trajectories}"
    return RolloutTree(
        prompt=prompt,
        trajectories=sorted(trajectories, key=lambda trajectory: trajectory.path),
        num_forks=num_forks,
        num_extra_roots=num_trajectories - num_forks - num_planned,
        num_abandoned_forks=len(tree.tasks) - len(trajectories),
    )


class _TreeSampler:
    """The trajectory runners of one prompt and their tasks, in starting order."""

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        tasks: list[asyncio.Task[Trajectory | None]],
    ) -> None:
        self.runners: list[Runner] = []
        self.tasks = tasks
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._num_roots = 0
        self._group = asyncio.TaskGroup()

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of the ended tasks, in starting order, without abandoned forks."""
        results = (task.result() for task in self.tasks)
        return [trajectory for trajectory in results if trajectory is not None]

    async def run_roots(self, budgets: Sequence[ForkBudget]) -> None:
        """Run one new root per budget, and all their forks, to the end."""
        async with asyncio.TaskGroup() as self._group:
            for budget in budgets:
                self._start_root(budget)

    async def expand(self, num_forks: int) -> None:
        """Run up to `num_forks` paths that branch off ended ones, and their forks, to the end.

        No path starts at a turn without a copy of its tools and user.
        """
        ended = sorted(self.trajectories, key=lambda item: item.path)
        runners = {runner.path: runner for runner in self.runners}
        async with asyncio.TaskGroup() as self._group:
            for path, position in self._context.policy.choose_expansions(ended, num_forks):
                runner = runners.get(path)
                if isinstance(runner, TrajectoryRunner):
                    await runner.fork_ended(position, PathBudget(0))
                else:
                    self._start_root(PathBudget(0))

    def _start_root(self, budget: ForkBudget) -> None:
        path = (self._num_roots,)
        self._num_roots += 1
        runner_type = AgentTrajectoryRunner if self._context.agents else TrajectoryRunner
        self._start(
            runner_type(
                self._context,
                self._prompt,
                self._prompt_key,
                path,
                budget=budget,
                on_fork=self._start,
            )
        )

    def _start(self, runner: Runner) -> None:
        """Run a path in the task group of the current round."""
        self.runners.append(runner)
        self.tasks.append(self._group.create_task(runner.run()))

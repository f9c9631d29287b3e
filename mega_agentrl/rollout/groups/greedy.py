"""The greedy trajectory of a prompt, which ReMax uses as the baseline of its group.

It runs concurrently with the group, with the same engines, tools and limits, at temperature 0 and
without branching, and is stored as `RolloutTree.greedy_trajectory`. It is scored like every
trajectory, but never trained on and not part of the group's statistics. If it fails,
`train.advantages` uses the mean of the group's other trajectories as the baseline; the metric
`rollout/greedy_failed` is the share of such groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching.policy import NoBranching
from mega_agentrl.rollout.tree import sample_tree

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory


async def sample_greedy_trajectory(
    context: RolloutContext, prompt: Prompt, prompt_key: str, tasks: list[asyncio.Task[Trajectory]]
) -> Trajectory:
    """Sample the greedy trajectory of a prompt, unscored.

    Args:
        context: The context of the group.
        prompt: The prompt.
        prompt_key: Name of the prompt, unique in the pass.
        tasks: Receives the task of the trajectory when it starts.
    """
    greedy_context = replace(
        context,
        config=replace(context.config, group_size=1, top_p=1.0, top_k=0),
        policy=NoBranching(),
        temperature=0.0,
        step=f"{context.step}-greedy",
        with_greedy=False,
    )
    tree = await sample_tree(greedy_context, prompt, prompt_key, tasks)
    return tree.trajectories[0]


def greedy_metrics(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """Return metrics of the greedy trajectories; empty if there are none.

    `greedy_reward` and `greedy_success` are means over the scored ones, `greedy_failed` is the
    share of the others. `greedy_tokens` and `greedy_calls` are the total sampled tokens and tool
    calls, which the metrics of the groups do not include.
    """
    trajectories = [tree.greedy_trajectory for tree in trees if tree.greedy_trajectory is not None]
    if not trajectories:
        return {}
    scores = [one.score for one in trajectories if not one.failed and one.score is not None]
    return {
        "greedy_reward": sum(score.value for score in scores) / max(1, len(scores)),
        "greedy_success": sum(score.correct for score in scores) / max(1, len(scores)),
        "greedy_failed": 1 - len(scores) / len(trajectories),
        "greedy_tokens": float(sum(sum(one.loss_mask) for one in trajectories)),
        "greedy_calls": float(sum(one.num_tool_calls for one in trajectories)),
    }

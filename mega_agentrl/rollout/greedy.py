"""The greedy answer to a prompt, beside its group: what ReMax takes as the baseline.

It runs with the same engines, tools and limits while the group grows, at temperature 0 and
without branching, and belongs to the tree as `RolloutTree.greedy`: scored as every trajectory,
never trained on, in no statistic of the group. Where it fails, the group has no baseline of its
own and `train.advantages` takes the mean of the others instead; `rollout/greedy_failed` says how
often.

Waits for: the engine and the tools, which have deadlines; unblocked by cancellation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching import NoBranching
from mega_agentrl.rollout.tree import grow_tree

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory


async def greedy_answer(
    context: RolloutContext, prompt: Prompt, prompt_key: str, tasks: list[asyncio.Task[Trajectory]]
) -> Trajectory:
    """The answer, unscored. context: of the group. tasks: gets its task as it starts."""
    alone = replace(
        context,
        config=replace(context.config, num_trajectories=1, top_p=1.0, top_k=0),
        policy=NoBranching(),
        temperature=0.0,
        step=f"{context.step}-greedy",
        with_greedy=False,
    )
    tree = await grow_tree(alone, prompt, prompt_key, tasks)
    return tree.trajectories[0]


def greedy_metrics(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """What the greedy answers earned and cost; empty without any.

    `greedy_reward`, `greedy_success`: means over those that have a score. `greedy_failed`: share
    of the others. `greedy_tokens`, `greedy_calls`: sampled tokens and tool calls of all together,
    which the group's numbers do not hold.
    """
    answers = [tree.greedy for tree in trees if tree.greedy is not None]
    if not answers:
        return {}
    scores = [one.score for one in answers if not one.failed and one.score is not None]
    return {
        "greedy_reward": sum(score.value for score in scores) / max(1, len(scores)),
        "greedy_success": sum(score.correct for score in scores) / max(1, len(scores)),
        "greedy_failed": 1 - len(scores) / len(answers),
        "greedy_tokens": float(sum(sum(one.loss_mask) for one in answers)),
        "greedy_calls": float(sum(one.num_calls for one in answers)),
    }

"""Collection of scored rollout trees for a list of prompts.

All prompts run concurrently, and each tree is scored as soon as it is complete. Engine, tools and
rewards have their own deadlines. Failed trajectories get no score, since they say nothing about
the policy. With `rollout.branching=released` the prompts advance in lock-step instead (see
`branching.lockstep_arpo`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.rollout.branching.lockstep_arpo import LockstepArpoRollout
from mega_agentrl.rollout.groups.scoring import start_scores, wait_for_scores
from mega_agentrl.rollout.tree import sample_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.protocols import Rubric
    from mega_agentrl.types.records import Prompt, RolloutTree


async def collect_rollouts(
    prompts: Sequence[Prompt], rubric: Rubric, context: RolloutContext
) -> list[RolloutTree]:
    """Collect one scored tree of `rollout.group_size` trajectories per prompt, in order.

    Args:
        prompts: The prompts; repeated prompts are sampled independently.
        rubric: Scores the trajectories.
        context: The context of the pass. Passes with the same seed and step draw the same samples.

    Raises:
        ValueError: A prompt leaves no room for a response.
    """
    check_prompt_lengths(prompts, context.max_model_len)
    keys = make_prompt_keys(prompts)
    try:
        if context.is_lockstep:
            trees = await LockstepArpoRollout(context, prompts, keys).run()
            await wait_for_scores(
                [score for tree in trees for score in start_scores(tree, rubric, context.spans)]
            )
            return trees
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_collect_tree(context, prompt, key, rubric))
                for prompt, key in zip(prompts, keys, strict=True)
            ]
    except ExceptionGroup as errors:
        raise unwrap_exception_group(errors) from None
    return [task.result() for task in tasks]


async def _collect_tree(
    context: RolloutContext, prompt: Prompt, prompt_key: str, rubric: Rubric
) -> RolloutTree:
    tree = await sample_tree(context, prompt, prompt_key)
    await wait_for_scores(start_scores(tree, rubric, context.spans))
    return tree


def make_prompt_keys(prompts: Sequence[Prompt]) -> list[str]:
    """Return a name per prompt, unique in the list and free of the request id separator ``/``."""
    keys = PromptKeyAllocator()
    return [keys.allocate(prompt) for prompt in prompts]


class PromptKeyAllocator:
    """Allocates unique prompt names one at a time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def allocate(self, prompt: Prompt) -> str:
        """Return a name for the prompt that was not returned before."""
        name = prompt.prompt_id.replace("/", "_")
        num_before = self._counts[name]
        self._counts[name] += 1
        return f"{name}#{num_before}" if num_before else name


def check_prompt_lengths(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise `ValueError` for the first prompt that leaves no room for a response."""
    for prompt in prompts:
        if len(prompt.token_ids) >= max_model_len:
            name = f"tokens of prompt {prompt.prompt_id}"
            expected = f"fewer than engine.max_model_len={max_model_len}"
            cause = "data.max_prompt_tokens is too large"
            raise InputError(name, len(prompt.token_ids), expected, cause)


def unwrap_exception_group(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the first exception that is not a group; groups nest as deeply as the tasks."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error

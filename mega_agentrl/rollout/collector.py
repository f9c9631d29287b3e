"""Collects the scored rollout trees of a step: all prompts at once, scored as each one ends.

Consumes prompts, produces one tree per prompt in the same order. Waits for the engine and the
tools through their ports, which own the deadlines; unblocked by the last trajectory or by
cancellation. A failed trajectory gets no score: it says nothing about the policy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching import BranchPolicy, make_policy
from mega_agentrl.rollout.trajectory import RolloutContext
from mega_agentrl.rollout.tree import grow_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import RolloutConfig
    from mega_agentrl.types.ports import Generator, Rubric, TextCodec, ToolProvider
    from mega_agentrl.types.records import Prompt, RolloutTree


async def collect(
    prompts: Sequence[Prompt],
    *,
    generator: Generator,
    tools: ToolProvider,
    codec: TextCodec,
    rubric: Rubric,
    config: RolloutConfig,
    max_model_len: int,
    seed: int,
    step: int | str,
    branching: BranchPolicy | None = None,
    temperature: float | None = None,
) -> list[RolloutTree]:
    """Scored trees of the prompts, `config.num_trajectories` trajectories each.

    max_model_len: prompt plus response, tokens. step: names the pass; passes with one seed
    and step draw alike. branching, temperature (0: greedy): None takes what `config` says.
    """
    _check_prompts(prompts, max_model_len)
    context = RolloutContext(
        generator=generator,
        tools=tools,
        codec=codec,
        policy=make_policy(config) if branching is None else branching,
        config=config,
        temperature=config.temperature if temperature is None else temperature,
        max_model_len=max_model_len,
        seed=seed,
        step=step,
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_collect_one(context, prompt, key, rubric))
                for prompt, key in zip(prompts, prompt_keys(prompts), strict=True)
            ]
    except ExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


async def _collect_one(
    context: RolloutContext, prompt: Prompt, prompt_key: str, rubric: Rubric
) -> RolloutTree:
    tree = await grow_tree(context, prompt, prompt_key)
    for trajectory in tree.trajectories:
        if not trajectory.failed:
            trajectory.score = rubric.score(trajectory)
    return tree


def prompt_keys(prompts: Sequence[Prompt]) -> list[str]:
    """A name per prompt, unique in the list and without the separator ``/`` of request ids."""
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for prompt in prompts:
        name = prompt.prompt_id.replace("/", "_")
        keys.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return keys


def _check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    for prompt in prompts:
        if len(prompt.token_ids) >= max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: got {len(prompt.token_ids)} tokens, expected fewer "
                f"than engine.max_model_len={max_model_len}; is data.max_prompt_tokens too large?"
            )


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first bug itself: groups nest as deep as the tasks do."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error

"""Collects the scored rollout trees of a step: all prompts at once, scored as each one ends.

Consumes prompts, produces one tree per prompt in the same order. Waits for the engine, the tools
and the rewards through their ports, which own the deadlines; unblocked by the last trajectory or
by cancellation. A failed trajectory gets no score: it says nothing about the policy. With
`rollout.branching=released` the prompts go in lock-step instead (see `released`); greedy
sampling never branches.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import Branching
from mega_agentrl.rollout.branching import NoBranching
from mega_agentrl.rollout.policies import make_policy
from mega_agentrl.rollout.released import ReleasedBatch
from mega_agentrl.rollout.scoring import start_scores, wait_for
from mega_agentrl.rollout.trajectory import RolloutContext
from mega_agentrl.rollout.tree import grow_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import RolloutConfig
    from mega_agentrl.rollout.branching import BranchPolicy
    from mega_agentrl.rollout.spans import RolloutSpans
    from mega_agentrl.rollout.tree_store import TreeStore
    from mega_agentrl.types.ports import Generator, Interactions, Rubric, TextCodec, ToolProvider
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
    interactions: Interactions | None = None,
    spans: RolloutSpans | None = None,
) -> list[RolloutTree]:
    """Scored trees of the prompts, `config.num_trajectories` trajectories each.

    max_model_len: prompt plus response, tokens. step: names the pass; passes with one seed
    and step draw alike. branching, temperature (0: greedy): None takes what `config` says.
    interactions: the simulated users of the prompts; None for none. spans: gets those of the
    trajectories.
    """
    check_prompts(prompts, max_model_len)
    context = make_context(
        generator=generator,
        tools=tools,
        codec=codec,
        config=config,
        max_model_len=max_model_len,
        seed=seed,
        step=step,
        branching=branching,
        temperature=temperature,
        interactions=interactions,
        spans=spans,
    )
    keys = prompt_keys(prompts)
    try:
        if goes_in_rounds(context) and branching is None:
            trees = await ReleasedBatch(context, prompts, keys).run()
            await wait_for([one for tree in trees for one in start_scores(tree, rubric, spans)])
            return trees
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_collect_one(context, prompt, key, rubric))
                for prompt, key in zip(prompts, keys, strict=True)
            ]
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


def make_context(
    *,
    generator: Generator,
    tools: ToolProvider,
    codec: TextCodec,
    config: RolloutConfig,
    max_model_len: int,
    seed: int,
    step: int | str,
    branching: BranchPolicy | None = None,
    temperature: float | None = None,
    interactions: Interactions | None = None,
    spans: RolloutSpans | None = None,
    with_greedy: bool = False,
    store: TreeStore | None = None,
) -> RolloutContext:
    """What the trajectories of one pass share; arguments as of `collect`.

    with_greedy: groups get a greedy answer beside them.
    """
    temperature = config.temperature if temperature is None else temperature
    if temperature == 0:
        branching = NoBranching()
    return RolloutContext(
        generator=generator,
        tools=tools,
        codec=codec,
        policy=make_policy(config) if branching is None else branching,
        config=config,
        temperature=temperature,
        max_model_len=max_model_len,
        seed=seed,
        step=step,
        interactions=interactions,
        spans=spans,
        with_greedy=with_greedy,
        store=store,
    )


def goes_in_rounds(context: RolloutContext) -> bool:
    """Whether the prompts go in lock-step, as `rollout.branching=released` does."""
    return context.config.branching is Branching.released and context.temperature > 0


async def _collect_one(
    context: RolloutContext, prompt: Prompt, prompt_key: str, rubric: Rubric
) -> RolloutTree:
    tree = await grow_tree(context, prompt, prompt_key)
    await wait_for(start_scores(tree, rubric, context.spans))
    return tree


def prompt_keys(prompts: Sequence[Prompt]) -> list[str]:
    """A name per prompt, unique in the list and without the separator ``/`` of request ids."""
    keys = PromptKeys()
    return [keys.take(prompt) for prompt in prompts]


class PromptKeys:
    """Names of prompts, each given once, that come one after the other."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def take(self, prompt: Prompt) -> str:
        """The name of the next prompt."""
        name = prompt.prompt_id.replace("/", "_")
        num_before = self._seen[name]
        self._seen[name] += 1
        return f"{name}#{num_before}" if num_before else name


def check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise `ValueError` for the first prompt that leaves no room for a response."""
    for prompt in prompts:
        if len(prompt.token_ids) >= max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: got {len(prompt.token_ids)} tokens, expected fewer "
                f"than engine.max_model_len={max_model_len}; is data.max_prompt_tokens too large?"
            )


def first_error(errors: ExceptionGroup[Exception]) -> Exception:
    """The first bug itself: groups nest as deep as the tasks do."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error

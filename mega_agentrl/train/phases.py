"""The verbs of the loop that collect. Each reads its inputs and returns.

Order within a step: collect -> pack -> log-probs and values -> the rewards that were missing
(`rewards`) -> corrections and advantages (`advantages`) -> update -> send weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import Advantage
from mega_agentrl.rollout.collector import make_context
from mega_agentrl.rollout.groups import GroupCollector

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.rollout.tree_store import TreeStore
    from mega_agentrl.types.parts import Parts
    from mega_agentrl.types.ports import Generator


@contextmanager
def open_groups(
    parts: Parts,
    config: TrainConfig,
    store: TreeStore | None = None,
    generator: Generator | None = None,
) -> Iterator[GroupCollector]:
    """What collects the groups of each step; ends those that are carried over at the end.

    store: keeps what has finished until a checkpoint has it. generator: another way to the
    engines than `parts.generator`.
    """
    context = make_context(
        generator=generator or parts.generator,
        tools=parts.tools,
        codec=parts.codec,
        interactions=parts.interactions,
        config=config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step="train",
        spans=parts.watch.spans,
        with_greedy=config.algo.advantage is Advantage.remax,
        store=store,
    )
    groups = GroupCollector(
        parts.prompts, context, parts.rubric, num_groups=config.data.prompts_per_step
    )
    try:
        yield groups
    finally:
        parts.wait(groups.close())


def collect_groups(parts: Parts, groups: GroupCollector, step: int) -> Collected:
    """Rollout trees of the step's prompts, `rollout.num_trajectories` leaves each.

    Scores that others work on may still be missing (`Collected.pending`).
    """
    return parts.wait(groups.collect(step_name(step)))


def step_name(step: int) -> str:
    """What keys the random streams of a step, and its trees in the store."""
    return f"train-{step}"

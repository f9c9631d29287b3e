"""Collect the groups of a training step.

A step collects, packs, computes log-probs and values, resolves pending rewards (`rewards`),
computes corrections and advantages (`advantages`), updates, and syncs the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import AdvantageEstimator
from mega_agentrl.rollout.collector import make_rollout_context
from mega_agentrl.rollout.groups.collector import RolloutCollector

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch
    from mega_agentrl.rollout.io.tree_store import TreeStore
    from mega_agentrl.types.components import Components
    from mega_agentrl.types.protocols import Generator


@contextmanager
def open_rollout_collector(
    components: Components,
    config: TrainConfig,
    tree_store: TreeStore | None = None,
    generator: Generator | None = None,
) -> Iterator[RolloutCollector]:
    """Yield the collector of the training groups; cancel carried-over groups on exit.

    Args:
        components: The parts of the run.
        config: Settings of the run.
        tree_store: Keeps finished trees until a checkpoint includes them.
        generator: Used in place of `components.generator`.
    """
    context = make_rollout_context(
        generator=generator or components.generator,
        tools=components.tools,
        codec=components.codec,
        interactions=components.interactions,
        config=config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step="train",
        spans=components.monitors.rollout_spans,
        with_greedy=config.algo.advantage is AdvantageEstimator.remax,
        tree_store=tree_store,
    )
    collector = RolloutCollector(
        components.prompt_source,
        context,
        components.rubric,
        num_groups=config.data.prompts_per_step,
    )
    try:
        yield collector
    finally:
        components.run_coroutine(collector.close())


def collect_rollouts(
    components: Components, collector: RolloutCollector, step: int
) -> RolloutBatch:
    """Return rollout trees of the step's prompts, `rollout.group_size` leaves each.

    Scores that are computed elsewhere may still be pending (`RolloutBatch.pending_scores`).
    """
    return components.run_coroutine(collector.collect(rollout_stream_name(step)))


def rollout_stream_name(step: int) -> str:
    """Return the key of a step's random streams, and of its trees in the store."""
    return f"train-{step}"

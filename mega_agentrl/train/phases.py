"""The verbs of the loop: collect, advantages, report values. Each reads its inputs and returns.

Order within a step: collect -> pack -> log-probs -> advantages -> update -> send weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, assert_never

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.config.choices import Advantage
from mega_agentrl.rollout.collector import make_context
from mega_agentrl.rollout.groups import GroupCollector

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.policy_schema import AlgoConfig
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.parts import Parts


@contextmanager
def open_groups(parts: Parts, config: TrainConfig) -> Iterator[GroupCollector]:
    """What collects the groups of each step; ends those that are carried over at the end."""
    context = make_context(
        generator=parts.generator,
        tools=parts.tools,
        codec=parts.codec,
        interactions=parts.interactions,
        config=config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step="train",
    )
    groups = GroupCollector(
        parts.prompts, context, parts.rubric, num_groups=config.data.prompts_per_step
    )
    try:
        yield groups
    finally:
        parts.wait(groups.close())


def collect_groups(parts: Parts, groups: GroupCollector, step: int) -> Collected:
    """Scored rollout trees of the step's prompts, `rollout.num_trajectories` leaves each."""
    return parts.wait(groups.collect(f"train-{step}"))


def add_advantages(batch: TrainBatch, algo: AlgoConfig) -> TrainBatch:
    """Fill `advantage_BT` [B, T] float32 from `reward_B` by the configured estimator.

    A trajectory counts once, however many rows it is; they all get its advantage.
    """
    first_B, mine_B = _first_rows(batch)
    reward_B, group_B, mask_BT = batch.reward_B[first_B], batch.group_B[first_B], batch.mask_BT
    match algo.advantage:
        case Advantage.grpo:
            advantage_B = estimators.grpo(reward_B, group_B, norm_by_std=algo.norm_by_std)
            advantage_BT = estimators.broadcast(advantage_B[mine_B], mask_BT)
        case Advantage.rloo:
            advantage_B = estimators.rloo(reward_B, group_B)
            advantage_BT = estimators.broadcast(advantage_B[mine_B], mask_BT)
        case Advantage.arpo_hard:
            advantage_B = estimators.grpo(reward_B, group_B, norm_by_std=algo.norm_by_std)
            advantage_BT = estimators.arpo_hard(advantage_B[mine_B], batch.node_BT, mask_BT)
        case _:
            assert_never(algo.advantage)
    return batch.with_fields(advantage_BT=advantage_BT)


def _first_rows(batch: TrainBatch) -> tuple[list[int], list[int]]:
    """The first row of each trajectory, and for each row the place of its own in that list."""
    if batch.owner_B is None:
        rows = list(range(batch.num_rows))
        return rows, rows
    owners = batch.owner_B.tolist()
    first = {owner: row for row, owner in reversed(list(enumerate(owners)))}
    place = {owner: index for index, owner in enumerate(sorted(first, key=first.__getitem__))}
    return sorted(first.values()), [place[owner] for owner in owners]


def mismatch_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far the engine's log-probs and entropies are from the actor's, over trained tokens.

    Absolute differences in nats of log-prob and of entropy, mean and max.
    """
    assert batch.old_logp_BT is not None and batch.entropy_BT is not None
    mask_BT = batch.mask_BT
    logp_gap_BT = _where(mask_BT, (batch.rollout_logp_BT - batch.old_logp_BT).abs())
    entropy_gap_BT = _where(mask_BT, (batch.rollout_entropy_BT - batch.entropy_BT).abs())
    return {
        "mismatch/logp_mean_abs": float(masked_mean(logp_gap_BT, mask_BT)),
        "mismatch/logp_max_abs": float(logp_gap_BT.max()),
        "mismatch/entropy_mean_abs": float(masked_mean(entropy_gap_BT, mask_BT)),
        "mismatch/entropy_max_abs": float(entropy_gap_BT.max()),
    }


def _where(mask_BT: torch.Tensor, value_BT: torch.Tensor) -> torch.Tensor:
    return value_BT.masked_fill(~mask_BT, 0.0)

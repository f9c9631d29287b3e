"""A policy on one rank of this process, and what it is sent of a batch, for benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.batch.packed_rows import POLICY_TARGETS, PackedRows
from mega_agentrl.batch.row_sharding import RowSharder, ScoringShard, UpdateShard
from mega_agentrl.estimate.flops import pairs_per_token
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.runtime.free_port import free_port

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch


def start_policy(config: TrainConfig, *, num_threads: int | None = None) -> PolicyRank:
    """Return a policy with the weights of `model.path`.

    Args:
        config: The run, with one rank.
        num_threads: CPU threads of an operation; None for as many as torch uses.
    """
    rank_info = RankInfo(
        rank=0,
        world_size=1,
        master_address="127.0.0.1",
        master_port=free_port(),
        timeout_s=300.0,
        num_threads=num_threads or torch.get_num_threads(),
    )
    policy = PolicyRank(config, rank_info)
    policy.load_hf(config.model.path)
    return policy


def make_shards(
    config: TrainConfig, batch: TrainBatch, *, share: bool
) -> tuple[ScoringShard, UpdateShard]:
    """Return what the rank is sent of a batch for a log-prob pass and an update of one step.

    Args:
        config: The run, with one rank.
        batch: The rows.
        share: Whether rows of a tree share their common tokens.
    """
    shape = ModelShape.from_folder(config.model.path)
    sharder = RowSharder.from_config(config, pairs_per_token(shape))
    rows = PackedRows.from_batch(batch, share=share)
    scored = sharder.scoring_shards(rows)
    (update,) = sharder.update_shards(
        batch,
        [batch.mask_BT],
        rows=rows,
        aggregation=str(config.algo.loss_aggregation),
        targets=POLICY_TARGETS,
        scored=scored,
    )
    return scored[0], update

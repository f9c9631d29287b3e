"""Calls of one rank with its share of a whole batch, as `runtime` makes them, but without Ray.

Also micro-batches and objectives of a whole batch, whose row numbers are then the indices.
"""

from __future__ import annotations

import numpy as np
import torch

from mega_agentrl.actor.critic import CriticRank
from mega_agentrl.actor.training import packing
from mega_agentrl.actor.training.objectives import PolicyObjective, SftObjective
from mega_agentrl.algo.policy_loss import loss_denominator
from mega_agentrl.batch.micro_batching import minibatch_masks
from mega_agentrl.batch.packed_rows import (
    CRITIC_TARGETS,
    POLICY_TARGETS,
    PackedRows,
    PackedScores,
    PackedTargets,
    pack_values,
    unpack_scores,
)
from mega_agentrl.batch.row_sharding import RowSharder

MAX_RESPONSE_TOKENS = 16
"""The longest possible response, with `seq_sum_norm`."""


def pack_rows(batch, rows, select_BT, device, **cut):
    """Pack rows of a batch, of whose response tokens `select_BT` are evaluated."""
    packed = PackedRows.from_batch(batch)
    select_M = pack_values(select_BT, packed.row_R, batch.length_B[packed.row_R])
    return packing.pack_rows(packed, list(rows), select_M, device, **cut)


def targets_of(batch, names=(), kl_weight_BT=None):
    """Return the targets of all rows."""
    return PackedTargets.from_batch(batch, np.arange(batch.num_rows), names, kl_weight_BT)


def policy_objective(algo, batch, kl_weight_BT=None):
    """Return the objective of a step on all rows."""
    denominator = loss_denominator(
        batch.mask_BT,
        str(algo.loss_aggregation),
        max_response_tokens=MAX_RESPONSE_TOKENS,
        trajectory_B=batch.trajectory_B,
    )
    targets = targets_of(batch, POLICY_TARGETS, kl_weight_BT)
    return PolicyObjective(algo, targets, denominator.item())


def sft_objective(batch):
    """Return the supervised objective of a step on all rows."""
    return SftObjective(targets_of(batch), float(batch.mask_BT.sum()))


def scoring_shards(rank, batch):
    """Return the shards of all data ranks for a pass over the batch."""
    return _sharder(rank).scoring_shards(PackedRows.from_batch(batch))


def score(rank, method, batch, *arguments):
    """Return row numbers and `[rows, T]` scores, or `[rows]` of a reward model; or None."""
    shards = scoring_shards(rank, batch)
    lengths_B, width = batch.length_B, batch.response_BT.size(1)
    if method == "compute_scores":
        longer = PackedRows.from_batch(batch).with_token_appended()
        shards = _sharder(rank).scoring_shards(longer)
        lengths_B, width = torch.ones_like(lengths_B), 1
    scores = getattr(rank, method)(_own(rank, shards), *arguments)
    if scores is None:
        return None
    alone = PackedScores(row_R=np.arange(len(scores.row_R)), values=scores.values)
    values = unpack_scores([alone], lengths_B[scores.row_R], width)
    if method == "compute_scores":
        values = tuple(value_R1.squeeze(1) for value_R1 in values)
    return scores.row_R.tolist(), *values


def update(rank, batch, kl_weight_BT=None, lr=None, scored=None, has_signal_B=None, *, share=True):
    """Update a policy or critic; `scored` is what `scoring_shards` returned for this batch.

    Rows that are False in `has_signal_B` are left out. Without `share` no row shares tokens with
    another.
    """
    config = rank._config
    shards = _sharder(rank).update_shards(
        batch,
        minibatch_masks(batch, config.optim.num_minibatches),
        rows=PackedRows.from_batch(batch, share=share),
        aggregation=str(config.algo.loss_aggregation),
        targets=CRITIC_TARGETS if isinstance(rank, CriticRank) else POLICY_TARGETS,
        kl_weight_BT=kl_weight_BT,
        scored=scored,
        has_signal_B=has_signal_B,
    )
    return rank.update(_own(rank, shards), scored and _own(rank, scored), lr)


def sft_shard(rank, batch):
    """Return the shard of a rank for a supervised step."""
    return _own(
        rank,
        _sharder(rank).update_shards(
            batch, [batch.mask_BT], rows=PackedRows.from_batch(batch), aggregation="token_mean"
        ),
    )


def sft_step(policy, batch, lr=None):
    """Take a supervised step."""
    return policy.sft_step(sft_shard(policy, batch), lr)


def call_policy(policy, method, *arguments):
    """Call a method of a policy rank; a batch among the arguments is divided first."""
    match method:
        case "compute_log_probs":
            return score(policy, method, *arguments)
        case "update":
            return update(policy, *arguments)
        case "sft_step":
            return sft_step(policy, *arguments)
    return getattr(policy, method)(*arguments)


def _sharder(rank):
    return RowSharder.from_config(rank.megatron_model.config)


def _own(rank, shards):
    return shards[rank.megatron_model.groups.coordinates.data_rank]

"""Jobs of the tests of replayed routes, run on each rank of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.config.enums import RouterReplay
from tests.parallel.policy_jobs import gradients_before_step
from tests.rank_shards import score, scoring_shards, update

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.routes import RecordedRoutes
    from tests.parallel.policy_jobs import Blocks

Scores = tuple[list[int], "torch.Tensor", "torch.Tensor"] | None


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Results of one rank; scores are row numbers, log-probs and entropies."""

    own: Scores
    """Scores with the policy's own routes."""
    recorded: list[RecordedRoutes]
    """These routes."""
    replayed: Scores
    """Scores with the routes of the batch."""
    stats: UpdateStats
    """Stats of an update with the routes of the batch and learning rate 0."""
    gradients: Blocks
    """Its gradients."""


def replay(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, routed: TrainBatch
) -> Replayed:
    """Score a batch without and with routes, and take the gradients with them."""
    config.model.router_replay = RouterReplay.old
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    own = score(policy, "compute_log_probs", batch)
    recorded = policy.recorded_routes()
    replayed = score(policy, "compute_log_probs", routed)
    with gradients_before_step(policy.megatron_model) as caught:
        stats = update(policy, routed, lr=0.0, scored=scoring_shards(policy, routed))
    policy.close()
    return Replayed(own=own, recorded=recorded, replayed=replayed, stats=stats, gradients=caught[0])


def reject_wrong_routes(
    rank_info: dict[str, Any], config: TrainConfig, batches: list[TrainBatch]
) -> list[str]:
    """Return the error of a log-prob pass over each batch; empty where there was none."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    messages = []
    for batch in batches:
        try:
            score(policy, "compute_log_probs", batch)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
    policy.close()
    return messages

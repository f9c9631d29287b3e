"""Jobs of the tests of critic and reward model, run on each rank."""

from __future__ import annotations

from mega_agentrl.actor.critic import CriticRank
from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.reward_model import RewardModelRank
from tests.parallel.policy_jobs import gradients_before_step, weights_of
from tests.rank_shards import score, scoring_shards, update

ROLES = {"critic": CriticRank, "reward": RewardModelRank}


def run_role(rank_info, role, config, calls):
    """Load a critic or reward model and return the results of `calls` on it.

    A call is (method, *arguments); `weights` returns the rank's blocks, `traced_update` is below.
    """
    rank = ROLES[role](config, RankInfo(**rank_info), model_path=config.model.path)
    rank.load_hf(config.model.path)
    results = [call(rank, method, *arguments) for method, *arguments in calls]
    rank.close()
    return results


def call(rank, method, *arguments):
    match method:
        case "weights":
            return weights_of(rank.megatron_model)
        case "traced_update":
            return traced_update(rank, *arguments)
        case "update":
            batch, lr = arguments
            return update(rank, batch, lr=lr)
    return score(rank, method, *arguments)


def traced_update(rank, batch, lr):
    """Stats of an update and this rank's gradients before clipping, step by step."""
    with gradients_before_step(rank.megatron_model) as caught:
        stats = update(rank, batch, lr=lr, scored=scoring_shards(rank, batch))
    return stats, caught

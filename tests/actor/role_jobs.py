"""Jobs of the tests of critic and reward model, run on each rank."""

from __future__ import annotations

from mega_agentrl.actor.critic import CriticRank
from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.reward_model import RewardModelRank
from tests.parallel.policy_jobs import gradients_before_step, weights_of

ROLES = {"critic": CriticRank, "reward": RewardModelRank}


def run_role(rank_info, role, config, calls):
    """Load a critic or reward model and return the results of `calls` on it.

    A call is (method, *arguments); `weights` and `traced_update` are the functions below.
    """
    rank = ROLES[role](config, RankInfo(**rank_info), model_path=config.model.path)
    rank.load_hf(config.model.path)
    own = {"weights": weights, "traced_update": traced_update}
    results = [
        own[method](rank, *arguments) if method in own else getattr(rank, method)(*arguments)
        for method, *arguments in calls
    ]
    rank.close()
    return results


def weights(rank):
    """(Hugging Face name, rectangle, values) of every block this rank holds."""
    return weights_of(rank.megatron_model)


def traced_update(rank, batch, lr):
    """Stats of an update and this rank's gradients before clipping, step by step."""
    with gradients_before_step(rank.megatron_model) as caught:
        stats = rank.update(batch, lr)
    return stats, caught

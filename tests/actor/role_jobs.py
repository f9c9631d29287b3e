"""What the tests of critic and reward model run on the ranks of a pool."""

from __future__ import annotations

from mega_agentrl.actor.critic import CriticRank
from mega_agentrl.actor.network import Seat
from mega_agentrl.actor.reward_model import RewardRank
from tests.parallel.policy_jobs import gradients_before_step, weights_of

ROLES = {"critic": CriticRank, "reward": RewardRank}


def run_role(seat, role, config, calls):
    """A loaded rank of a role for config.model.path, and the results of its `calls`.

    A call is (method, *arguments); `weights` and `traced_update` are the functions below.
    """
    rank = ROLES[role](config, Seat(**seat), model_path=config.model.path)
    rank.load(config.model.path)
    own = {"weights": weights, "traced_update": traced_update}
    results = [
        own[method](rank, *arguments) if method in own else getattr(rank, method)(*arguments)
        for method, *arguments in calls
    ]
    rank.close()
    return results


def weights(rank):
    """(Hugging Face name, rectangle, values) of every block this rank holds."""
    return weights_of(rank.network)


def traced_update(rank, batch, lr):
    """Stats of an update and this rank's gradients before clipping, step by step."""
    with gradients_before_step(rank.network) as caught:
        stats = rank.update(batch, lr)
    return stats, caught

"""What the tests of the objective run on each rank of a layout."""

from __future__ import annotations

from mega_agentrl.actor.network import Seat
from mega_agentrl.actor.policy import PolicyRank
from tests.parallel.policy_jobs import gradients_before_step


def gradients(seat, config, batch, algos):
    """Stats and this rank's gradients before clipping, of an update under each objective."""
    policy = PolicyRank(config, Seat(**seat))
    policy.load(config.model.path)
    found = []
    for algo in algos:
        policy.set_objective(algo, config.rollout.temperature)
        with gradients_before_step(policy.network) as caught:
            stats = policy.update(batch, lr=0.0)
        found.append((stats, caught[0]))
    policy.close()
    return found

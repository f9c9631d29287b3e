"""Job of the objective tests, run on each rank of a layout."""

from __future__ import annotations

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from tests.parallel.policy_jobs import gradients_before_step
from tests.rank_shards import update


def gradients(rank_info, config, batch, algos):
    """Return stats and gradients before clipping of an update under each objective."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    found = []
    for algo in algos:
        policy.set_objective(algo, config.rollout.temperature)
        with gradients_before_step(policy.megatron_model) as caught:
            stats = update(policy, batch, lr=0.0)
        found.append((stats, caught[0]))
    policy.close()
    return found

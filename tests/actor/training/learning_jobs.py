"""Job of the test that every algorithm learns: advantages and updates as a step makes them."""

from __future__ import annotations

import torch

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.train.advantages import add_advantages
from tests.rank_shards import score, update

NUM_STEPS = 2
LR = 1e-2


def learn(rank_info, config, batch, algos, cot_marker_ids):
    """Return the log-probs `[B, T]` before and after some steps with each algorithm."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    found = []
    for algo in algos:
        policy.load_hf(config.model.path)
        policy.set_objective(algo, 1.0)
        before_BT = _scores(policy, batch)[0]
        for _ in range(NUM_STEPS):
            logp_BT, entropy_BT = _scores(policy, batch)
            scored = batch.with_fields(
                rollout_logp_BT=logp_BT, old_logp_BT=logp_BT, entropy_BT=entropy_BT
            )
            if algo.needs_reference:
                scored = scored.with_fields(ref_logp_BT=_scores(policy, batch, True)[0])
            filled, _ = add_advantages(
                scored, algo, kl_coef=algo.kl_coef, cot_marker_ids=cot_marker_ids
            )
            update(policy, filled, lr=LR)
        found.append((before_BT, _scores(policy, batch)[0]))
    policy.close()
    return found


def _scores(policy, batch, reference=False):
    """Return log-probs and entropies of all rows, `[B, T]`."""
    rows, *values = score(policy, "compute_log_probs", batch, reference)
    order = torch.tensor(rows).argsort()
    return tuple(value_RT[order] for value_RT in values)

"""ARES (arXiv 2510.08457): adaptive reward shaping and KL weights from high-entropy windows.

A training step shapes rewards and weighs the KL term with the state from before it; then `update`
computes the next state from the training rollouts. Filters and the bootstrap pass belong to the
training loop; a bootstrap is one `update` with the statistics of the whole data set.
"""

from mega_agentrl.algo.ares.controllers import update, update_threshold
from mega_agentrl.algo.ares.entropy_windows import (
    hwe_count,
    hwe_mask,
    normalize_trigger_token,
    soft_cost,
    threshold_p95,
    window_entropy,
)
from mega_agentrl.algo.ares.reward import (
    DIFFICULTY_NAMES,
    EASY,
    HARD,
    MEDIUM,
    difficulty,
    entropy_reward,
    token_kl_weight,
)
from mega_agentrl.algo.ares.state import (
    PAPER_HYPERPARAMS,
    RELEASED_HYPERPARAMS,
    UNSEEN,
    AresHyperparams,
    AresState,
    AresStats,
    ReleasedKLController,
    metrics,
)

__all__ = [
    "DIFFICULTY_NAMES",
    "EASY",
    "HARD",
    "MEDIUM",
    "PAPER_HYPERPARAMS",
    "RELEASED_HYPERPARAMS",
    "UNSEEN",
    "AresHyperparams",
    "AresState",
    "AresStats",
    "ReleasedKLController",
    "difficulty",
    "entropy_reward",
    "hwe_count",
    "hwe_mask",
    "metrics",
    "normalize_trigger_token",
    "soft_cost",
    "threshold_p95",
    "token_kl_weight",
    "update",
    "update_threshold",
    "window_entropy",
]

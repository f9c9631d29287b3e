"""Conditions of engines on the policy's GPUs (`cluster.colocated`).

Part of `check.check`. Each engine is on the GPUs of `engine.tensor` policy ranks that follow each
other, and each of these GPUs belongs to one engine at most. Critic and reward model have GPUs of
their own either way. Whether both sides fit a GPU is the preflight's question.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


def check_colocation(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that `config` breaks."""
    if not config.cluster.colocated:
        return
    if config.rollout.staleness:
        raise ValueError(
            f"rollout.staleness={config.rollout.staleness}: expected 0 with "
            "cluster.colocated=true, rollouts and learning at once both need the GPUs; probable "
            "cause: settings for engines on GPUs of their own"
        )
    ranks, tensor = config.parallel.num_ranks, config.engine.tensor
    needed = config.cluster.num_engines * tensor
    if ranks % needed:
        raise ValueError(
            f"cluster.num_engines={config.cluster.num_engines}: with engine.tensor={tensor} the "
            f"engines have {needed} ranks; expected a divisor of the policy's {ranks}, whose GPUs "
            "they share with cluster.colocated=true; probable cause: a number of engines for GPUs "
            "of their own"
        )


def ranks_in_a_node(config: TrainConfig) -> int:
    """Policy ranks that must be on one machine together: whole tensor groups, whole engines."""
    tensor = config.parallel.tensor
    return lcm(tensor, config.engine.tensor) if config.cluster.colocated else tensor

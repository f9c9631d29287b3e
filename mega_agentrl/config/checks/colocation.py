"""Check engines on the policy's GPUs (`cluster.colocated`).

Each engine is on the GPUs of `engine.tensor_parallel_size` consecutive policy ranks; no two engines
share a GPU. Critic and reward model always have their own GPUs. The preflight checks whether both
sides fit into the GPU memory.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


def check_colocation(config: TrainConfig) -> None:
    """Raise a `ValueError` for the first condition that `config` violates."""
    if not config.cluster.colocated:
        return
    if config.rollout.max_staleness:
        raise ValueError(
            f"rollout.max_staleness={config.rollout.max_staleness}: expected 0 with "
            "cluster.colocated=true, where sampling and training share the GPUs; probable cause: "
            "settings for engines on separate GPUs"
        )
    ranks, tensor = config.parallel.world_size, config.engine.tensor_parallel_size
    needed = config.cluster.num_engines * tensor
    if ranks % needed:
        raise ValueError(
            f"cluster.num_engines={config.cluster.num_engines}: with "
            f"engine.tensor_parallel_size={tensor} the engines have {needed} ranks; expected a "
            f"divisor of the policy's {ranks}, whose GPUs they share with cluster.colocated=true; "
            "probable cause: a number of engines for separate GPUs"
        )


def min_ranks_per_node(config: TrainConfig) -> int:
    """Number of consecutive policy ranks that must be on one machine.

    Tensor-parallel groups and colocated engines do not span machines.
    """
    tensor = config.parallel.tensor
    return lcm(tensor, config.engine.tensor_parallel_size) if config.cluster.colocated else tensor

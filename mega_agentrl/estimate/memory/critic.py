"""Estimates the memory of the critic's ranks.

The critic is the policy's transformer with a scalar head, on ranks of its own. Weights, gradients,
optimizer and activations are those of a policy in the same layout, but there is no vocabulary head,
no reference and no weight transfer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.estimate.memory.policy import estimate_policy_memory

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.memory.policy import PolicyMemory
    from mega_agentrl.reshard.mapping.model_shape import ModelShape


def estimate_critic_memory(
    config: TrainConfig, shape: ModelShape, device: DeviceSpec, *, imbalance: float = 1.0
) -> list[PolicyMemory]:
    """Return the critic's memory by pipeline stage, [] without a critic.

    Args:
        config: the run.
        shape: the policy model.
        device: the device of a rank.
        imbalance: tokens of the busiest expert rank divided by the mean.

    Raises:
        ValueError: the parallel sizes do not divide the model.
    """
    if not config.algo.needs_critic or config.is_eval_only:
        return []
    stages = estimate_policy_memory(config, shape.with_scalar_head(), device, imbalance=imbalance)
    unused = dict.fromkeys(
        (
            "head_workspace",
            "transfer_buckets",
            "reference_staging",
            "pinned_host",
            "sleeping_engine",
            "colocated_transfer_peak",
        ),
        0,
    )
    return [replace(memory, **unused) for memory in stages]

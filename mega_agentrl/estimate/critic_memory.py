"""Memory of the critic's ranks: a policy's body under one number a token, on ranks of its own.

Weights, gradients, optimizer and activations as of a policy in the same layout. There is no head
over the vocabulary, no reference and no weight transfer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.estimate.policy_memory import policy_memory

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.estimate.policy_memory import PolicyMemory
    from mega_agentrl.reshard.model_shape import ModelShape


def critic_memory(
    config: TrainConfig, shape: ModelShape, device: Device, *, imbalance: float = 1.0
) -> list[PolicyMemory]:
    """By pipeline stage; [] without a critic. shape: of the policy.

    Raises `ValueError` where the cut does not divide the model.
    """
    if not config.algo.needs_critic or config.validates_only:
        return []
    stages = policy_memory(config, shape.with_scalar_head(), device, imbalance=imbalance)
    without = dict.fromkeys(("logits", "transfer", "reference", "host", "neighbour", "both"), 0)
    return [replace(memory, **without) for memory in stages]

"""An advantage in one file (`algo.advantage=examples/my_algorithm.py`): docs/own_algorithm.md."""

import torch

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.types.batch import TrainBatch


def advantage(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:
    """Return the [B, T] reward minus the group's median, scaled up where the entropy is high."""
    centered_B = torch.zeros_like(batch.reward_B)
    for group in batch.group_B.unique():
        rows = batch.group_B == group
        centered_B[rows] = batch.reward_B[rows] - batch.reward_B[rows].quantile(0.5)
    assert batch.entropy_BT is not None
    return centered_B[:, None] * (1 + batch.entropy_BT.clamp(max=1.0))

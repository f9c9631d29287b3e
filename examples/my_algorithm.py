"""An advantage in one file (`algo.advantage=examples/my_algorithm.py`): docs/own_algorithm.md."""

import torch

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.train.estimators.registry import AdvantageInputs, AdvantageResult


def advantage(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """Return the [B, T] reward minus the group's median, scaled up where the entropy is high."""
    batch = inputs.batch
    centered_B = torch.zeros_like(batch.reward_B)
    for group in batch.group_B.unique():
        rows = batch.group_B == group
        centered_B[rows] = batch.reward_B[rows] - batch.reward_B[rows].quantile(0.5)
    assert batch.entropy_BT is not None
    return AdvantageResult(centered_B[:, None] * (1 + batch.entropy_BT.clamp(max=1.0)))

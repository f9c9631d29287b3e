"""An advantage in one file (`algo.advantage=examples/my_algorithm.py`): docs/own_algorithm.md."""

import torch

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.train.estimators.registry import AdvantageInputs, AdvantageResult


def advantage(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """Return the [B, T] reward minus the group's median, scaled up where the entropy is high."""
    reward_A, group_A = inputs.reward_A, inputs.group_A
    centered_A = torch.zeros_like(reward_A)
    for group in group_A.unique():
        members = group_A == group
        centered_A[members] = reward_A[members] - reward_A[members].quantile(0.5)
    centered_B = centered_A[inputs.rows.trajectory_B]
    assert inputs.batch.entropy_BT is not None
    return AdvantageResult(centered_B[:, None] * (1 + inputs.batch.entropy_BT.clamp(max=1.0)))

"""Jobs of a policy rank on a GPU or a CPU, run by `tests.parallel.pool`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.actor.training.offload import ALL_STATE
from tests.rank_shards import sft_step

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


def step_around_offloading(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, lr: float
) -> tuple[UpdateStats, UpdateStats, dict[str, int]]:
    """Take the second of two steps with and without moving everything to the host in between.

    Returns:
        Stats of the second step without and with moving, and the bytes of GPU memory that the
        policy has allocated `resident` and `offloaded`.
    """
    before = torch.cuda.memory_allocated()
    policy = PolicyRank(config, RankInfo(**rank_info))
    seconds, allocated = [], {}
    for moves in (False, True):
        policy.load_hf(config.model.path)
        sft_step(policy, batch, lr)
        if moves:
            allocated["resident"] = torch.cuda.memory_allocated() - before
            policy.set_gpu_resident(frozenset())
            allocated["offloaded"] = torch.cuda.memory_allocated() - before
            policy.set_gpu_resident({"weights"})
            policy.set_gpu_resident(ALL_STATE)
        seconds.append(sft_step(policy, batch, lr))
    policy.close()
    return *seconds, allocated

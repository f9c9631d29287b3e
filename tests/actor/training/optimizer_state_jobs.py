"""Job of two data ranks that resumes with and without the distributed optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mega_agentrl.actor import device
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.config.schema import ParallelConfig
from tests.actor.training.test_optimizer_state import build, restore, saved


def resume(rank_info):
    """Train, save, resume; return the parameters of each run after one more step."""
    device.init_device(rank_info["rank"])
    groups = process_groups.init_process_groups(ParallelConfig(data=2), **rank_info)
    chunk, optimizer, step = build(groups, torch.float32, distributed=True)
    step(0)
    step(1)
    mine, num_steps = saved(chunk, optimizer)
    both = [None, None]
    dist.all_gather_object(both, mine)
    # Neither rank holds everything.
    assert sum(values["param"].numel() for _, _, values in mine) < sum(
        parameter.numel() for parameter in chunk.module.parameters()
    )
    weights = {name: value.clone() for name, value in chunk.module.state_dict().items()}
    step(2)
    results = {"uninterrupted": weights_of(chunk)}
    for name, distributed in (("distributed", True), ("plain", False)):
        chunk, optimizer, step = build(groups, torch.float32, distributed=distributed)
        chunk.module.load_state_dict(weights)
        restore(chunk, optimizer, [*both[0], *both[1]], num_steps)
        step(2)
        results[name] = weights_of(chunk)
    process_groups.destroy_process_groups()
    return results


def weights_of(chunk):
    return {name: value.detach().clone() for name, value in chunk.module.named_parameters()}

"""Jobs that run on each of two data ranks to resume with and without the distributed optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mega_agentrl.actor import device, groups
from mega_agentrl.config.schema import ParallelConfig
from tests.actor.test_optimizer_state import build, restore, saved


def resume(seat):
    """Train with it, save, resume: parameters after one more step, of the first and later runs."""
    device.choose_device(seat["rank"])
    joined = groups.join(ParallelConfig(data=2), **seat)
    chunk, optimizer, step = build(joined, torch.float32, distributed=True)
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
        chunk, optimizer, step = build(joined, torch.float32, distributed=distributed)
        chunk.module.load_state_dict(weights)
        restore(chunk, optimizer, [*both[0], *both[1]], num_steps)
        step(2)
        results[name] = weights_of(chunk)
    groups.leave()
    return results


def weights_of(chunk):
    return {name: value.detach().clone() for name, value in chunk.module.named_parameters()}

"""Jobs of two ranks that step the small model under several layouts, or save and resume it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from mega_agentrl.actor import megatron_compat
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.actor.training.optimizer import MOMENTS, AdamOptimizer
from mega_agentrl.config.sections.policy import ParallelConfig
from tests.actor.training.small_model import SETTINGS, fill, wrap

BF16 = torch.bfloat16
KINDS = ("param", *MOMENTS)
# name: layout, dtype, distributed optimizer, which gradient of rank 1 is NaN in the second
# step, and whether it becomes infinite only after the sum over data ranks instead
CASES = {
    "data": ({"data": 2}, torch.float32, False, "matrix", True),
    "data, distributed": ({"data": 2}, torch.float32, True, "vector"),
    "data, bf16": ({"data": 2}, BF16, False, "matrix"),
    "data, bf16, distributed": ({"data": 2}, BF16, True, "matrix"),
    "tensor": ({"tensor": 2}, torch.float32, False, "vector", True),
    "tensor, distributed": ({"tensor": 2}, torch.float32, True, "matrix"),
    "pipeline": ({"pipeline": 2}, torch.float32, False, "tied"),
    "pipeline, distributed": ({"pipeline": 2}, torch.float32, True, "router"),
    "expert": ({"data": 2, "expert": 2}, torch.float32, False, "expert"),
    "expert, distributed": ({"data": 2, "expert": 2}, torch.float32, True, "expert"),
    "expert in tensor": ({"tensor": 2, "expert": 2}, torch.float32, True, "expert"),
}


def build(groups, dtype, distributed, experts=False):
    """Return (chunk, optimizer, function that takes a step) on this rank."""
    chunk = wrap(groups, dtype, distributed=distributed, experts=experts)
    optimizer = AdamOptimizer([chunk], groups, SETTINGS, dtype, distributed=distributed)

    def step(number, lr=0.05):
        optimizer.zero_grad()
        fill(chunk, groups, number)
        return optimizer.step(lr)

    return chunk, optimizer, step


def saved(chunk, optimizer):
    """Return [(name, first element, values)] of this rank, and the number of steps."""
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    shards = [
        (names[id(parameter)], first, {kind: value.clone() for kind, value in values.items()})
        for parameter, first, values in optimizer.state_shards()
    ]
    return shards, optimizer.num_steps


def restore(chunk, optimizer, shards, num_steps):
    """Merge the saved state of all ranks and write it into the shards of this rank."""
    whole = {
        name: {kind: torch.full((p.numel(),), torch.nan) for kind in KINDS}
        for name, p in chunk.module.named_parameters()
    }
    for name, first, values in shards:
        for kind, value in values.items():
            whole[name][kind][first : first + value.numel()] = value
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    for parameter, first, values in optimizer.state_shards():
        for kind, value in values.items():
            value.copy_(whole[names[id(parameter)]][kind][first : first + value.numel()])
    optimizer.set_num_steps(num_steps)


def run(groups, dtype, distributed, poisoned, late=False):
    rank = groups.coordinates.data_rank + groups.coordinates.model_parallel_rank.tensor_rank
    rank += groups.coordinates.model_parallel_rank.pipeline_rank
    experts = groups.coordinates.model_parallel_rank.expert_size > 1
    chunk, optimizer, _ = build(groups, dtype, distributed, experts)
    results = []
    for step, poison in ((0, False), (1, True), (1, False), (2, False)):
        optimizer.zero_grad()
        fill(chunk, groups, step, [poisoned] if poison and rank == 1 and not late else [])
        if poison and rank == 1 and late:
            getattr(chunk.module, poisoned).main_grad.view(-1)[0] = math.inf
        results.append(optimizer.step(0.05 * (step + 1)))
    parameters = {
        name: (chunk.module.cuts[name].start, parameter.detach().float().clone())
        for name, parameter in chunk.module.named_parameters()
    }
    return results, parameters, optimizer.num_steps


def step_cases(rank_info, ports):
    """Return (norm, applied) of each step, parameters and step count, by case; one port each.

    Each case takes step 0, one with a NaN on rank 1, then steps 1 and 2.
    """
    megatron_compat.init_device(rank_info["rank"])
    results = {}
    for port, (name, (layout, *settings)) in zip(ports, CASES.items(), strict=True):
        groups = process_groups.init_process_groups(
            ParallelConfig(**layout), **rank_info | {"master_port": port}
        )
        results[name] = run(groups, *settings)
        process_groups.destroy_process_groups()
    return results


def resume(rank_info):
    """Train, save, resume; return the parameters of each run after one more step."""
    megatron_compat.init_device(rank_info["rank"])
    groups = process_groups.init_process_groups(ParallelConfig(data=2), **rank_info)
    chunk, optimizer, step = build(groups, torch.float32, distributed=True)
    step(0)
    step(1)
    own, num_steps = saved(chunk, optimizer)
    both = [None, None]
    dist.all_gather_object(both, own)
    # Neither rank holds everything.
    assert sum(values["param"].numel() for _, _, values in own) < sum(
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

"""Jobs of two ranks that step the small model under several layouts.

Each layout takes step 0, one with a NaN on rank 1, then steps 1 and 2.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.actor import device
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.actor.training.optimizer import AdamOptimizer
from mega_agentrl.config.schema import ParallelConfig
from tests.actor.training.small_model import SETTINGS, fill, wrap

BF16 = torch.bfloat16
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


def run(groups, dtype, distributed, poisoned, late=False):
    rank = groups.coordinates.data_rank + groups.coordinates.model_parallel_rank.tensor_rank
    rank += groups.coordinates.model_parallel_rank.pipeline_rank
    experts = groups.coordinates.model_parallel_rank.expert_size > 1
    chunk = wrap(groups, dtype, distributed=distributed, experts=experts)
    optimizer = AdamOptimizer([chunk], groups, SETTINGS, dtype, distributed=distributed)
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
    """Return (norm, applied) of each step, parameters and step count, by case; one port each."""
    device.init_device(rank_info["rank"])
    results = {}
    for port, (name, (layout, *settings)) in zip(ports, CASES.items(), strict=True):
        groups = process_groups.init_process_groups(
            ParallelConfig(**layout), **rank_info | {"master_port": port}
        )
        results[name] = run(groups, *settings)
        process_groups.destroy_process_groups()
    return results

"""Jobs that run on each of two ranks to step the small network under several layouts.

Each layout takes step 0, one with a NaN on rank 1, then steps 1 and 2.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.actor import device, groups
from mega_agentrl.actor.optimizer import PolicyOptimizer
from mega_agentrl.config.schema import ParallelConfig
from tests.actor.small_network import SETTINGS, fill, wrap

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


def run(joined, dtype, distributed, poisoned, late=False):
    rank = joined.position.data_rank + joined.position.place.tensor_rank
    rank += joined.position.place.pipeline_rank
    experts = joined.position.place.expert_size > 1
    chunk = wrap(joined, dtype, distributed=distributed, experts=experts)
    optimizer = PolicyOptimizer([chunk], joined, SETTINGS, dtype, distributed=distributed)
    results = []
    for step, poison in ((0, False), (1, True), (1, False), (2, False)):
        optimizer.zero_grad()
        fill(chunk, joined, step, [poisoned] if poison and rank == 1 and not late else [])
        if poison and rank == 1 and late:
            getattr(chunk.module, poisoned).main_grad.view(-1)[0] = math.inf
        results.append(optimizer.step(0.05 * (step + 1)))
    parameters = {
        name: (chunk.module.cuts[name].start, parameter.detach().float().clone())
        for name, parameter in chunk.module.named_parameters()
    }
    return results, parameters, optimizer.num_steps


def step_cases(seat, ports):
    """Norms and whether taken, parameters, number of steps, by case; ports: one for each."""
    device.choose_device(seat["rank"])
    results = {}
    for port, (name, (layout, *settings)) in zip(ports, CASES.items(), strict=True):
        joined = groups.join(ParallelConfig(**layout), **seat | {"master_port": port})
        results[name] = run(joined, *settings)
        groups.leave()
    return results

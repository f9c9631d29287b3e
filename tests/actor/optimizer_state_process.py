"""One of two data ranks: train with the distributed optimizer, save, resume with and without it.

``python optimizer_state_process.py RANK PORTS RESULT``; saved are the parameters after one more
step, of the first run and of the resumed ones.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from mega_agentrl.actor import device, groups
from mega_agentrl.config.schema import ParallelConfig
from tests.actor.test_optimizer_state import build, restore, saved


def main() -> None:
    rank, ports = int(sys.argv[1]), sys.argv[2].split(",")
    device.choose_device(rank)
    joined = groups.join(
        ParallelConfig(data=2),
        rank=rank,
        world_size=2,
        master_address="127.0.0.1",
        master_port=int(ports[0]),
        timeout_s=30.0,
    )
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
    torch.save(results, sys.argv[3])
    groups.leave()


def weights_of(chunk):
    return {name: value.detach().clone() for name, value in chunk.module.named_parameters()}


if __name__ == "__main__":
    main()

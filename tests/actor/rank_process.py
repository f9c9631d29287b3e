"""One policy rank as a process of its own: runs the jobs of a file one after the
other, each with a fresh policy, and saves the results.

``python rank_process.py JOBS RANK RESULT``; the file is made by ``conftest.run_ranks``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mega_agentrl.actor.policy import PolicyRank


def blocks_of(policy: PolicyRank, *, gradients: bool) -> list[tuple[str, Any, torch.Tensor]]:
    """(Hugging Face name, rectangle, values) of every block this rank holds."""
    found = []
    for shard in policy.layout():
        local = policy.parameter(shard.name)
        if gradients:
            local = policy._parameters[shard.name].main_grad
        found += [
            (block.hf_name, block.hf_rect, local[block.local_rect.slices].clone())
            for block in shard.blocks
        ]
    return found


def run(job: dict[str, Any], rank: int) -> list[Any]:
    policy = PolicyRank(
        job["config"],
        rank=rank,
        world_size=job["world_size"],
        master_address="127.0.0.1",
        master_port=job["port"],
        timeout_s=60.0,
    )
    results = []
    for method, *arguments in job["calls"]:
        if method in ("weights", "gradients"):
            results.append(blocks_of(policy, gradients=method == "gradients"))
        else:
            results.append(getattr(policy, method)(*arguments))
    policy.close()
    return results


def main() -> None:
    jobs = torch.load(sys.argv[1], weights_only=False)
    results = {name: run(job, int(sys.argv[2])) for name, job in jobs.items()}
    torch.save(results, sys.argv[3])


if __name__ == "__main__":
    main()

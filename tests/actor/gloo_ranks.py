"""A function on several ranks of the pool, in one gloo group over all of them.

    results = run_ranks(rank_pool, work, 2, "argument")     # work(rank, group, "argument") on each

`work` is a function of a module and leaves the process as it was; results come by rank.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def run_ranks(pool, work, size, *arguments):
    """Results by rank."""
    return pool.run(_work_in_group, size, work, *arguments)


def join_gloo(seat):
    """The group of all ranks of a job; the pool leaves it."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat['master_address']}:{seat['master_port']}",
        rank=seat["rank"],
        world_size=seat["world_size"],
        timeout=timedelta(seconds=seat["timeout_s"]),
    )
    return dist.group.WORLD


def _work_in_group(seat, work, *arguments):
    return work(seat["rank"], join_gloo(seat), *arguments)

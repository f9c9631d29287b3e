"""Run a function on several ranks of the pool, in one gloo group over all of them.

    results = run_ranks(rank_pool, work, 2, "argument")     # work(rank, group, "argument") on each

`work` must be a top-level function and must not change the process; results are by rank.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def run_ranks(pool, work, size, *arguments):
    """Run `work` on `size` ranks and return the results by rank."""
    return pool.run(_work_in_group, size, work, *arguments)


def join_gloo(rank_info):
    """Join the group of all ranks of a job; the pool destroys it."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{rank_info['master_address']}:{rank_info['master_port']}",
        rank=rank_info["rank"],
        world_size=rank_info["world_size"],
        timeout=timedelta(seconds=rank_info["timeout_s"]),
    )
    return dist.group.WORLD


def _work_in_group(rank_info, work, *arguments):
    return work(rank_info["rank"], join_gloo(rank_info), *arguments)

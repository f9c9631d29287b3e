"""What the pool's own tests run on its ranks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.actor.gloo_ranks import join_gloo


def sum_of_ranks(rank_info, offset):
    """Sum of rank + offset over all ranks."""
    group = join_gloo(rank_info)
    total = torch.tensor(rank_info["rank"] + offset)
    dist.all_reduce(total, group=group)
    return int(total)


def pid(rank_info):
    return os.getpid()


def fail_on_last(rank_info):
    """The last rank fails while the others wait for it."""
    if rank_info["rank"] == rank_info["world_size"] - 1:
        return 1 // 0
    return sum_of_ranks(rank_info, 0)


def die(rank_info):
    print("last words", flush=True)
    os._exit(3)


def sleep(rank_info):
    time.sleep(600)

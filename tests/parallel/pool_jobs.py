"""What the pool's own tests run on its ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def sum_of_ranks(rank_info, offset):
    """Sum of rank + offset over all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{rank_info['master_address']}:{rank_info['master_port']}",
        rank=rank_info["rank"],
        world_size=rank_info["world_size"],
        timeout=timedelta(seconds=rank_info["timeout_s"]),
    )
    total = torch.tensor(rank_info["rank"] + offset)
    dist.all_reduce(total)
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

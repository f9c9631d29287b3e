"""What the pool's own tests run on its ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def sum_of_ranks(seat, offset):
    """Sum of rank + offset over all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat['master_address']}:{seat['master_port']}",
        rank=seat["rank"],
        world_size=seat["world_size"],
        timeout=timedelta(seconds=seat["timeout_s"]),
    )
    total = torch.tensor(seat["rank"] + offset)
    dist.all_reduce(total)
    return int(total)


def pid(seat):
    return os.getpid()


def fail_on_last(seat):
    """The last rank fails while the others wait for it."""
    if seat["rank"] == seat["world_size"] - 1:
        return 1 // 0
    return sum_of_ranks(seat, 0)


def die(seat):
    print("last words", flush=True)
    os._exit(3)


def sleep(seat):
    time.sleep(600)

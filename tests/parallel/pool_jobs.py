"""What the pool's own tests run on its ranks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.actor.gloo_ranks import join_gloo


def pid(rank_info):
    return os.getpid()


def fail_on_last(rank_info):
    """The last rank fails while the others wait for it."""
    if rank_info["rank"] == rank_info["world_size"] - 1:
        return 1 // 0
    return dist.all_reduce(torch.zeros(1), group=join_gloo(rank_info))


def die(rank_info):
    print("last words", flush=True)
    os._exit(3)


def sleep(rank_info):
    time.sleep(600)

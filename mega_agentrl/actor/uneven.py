"""Gathering and scattering of unequal parts over gloo.

Where experts are cut over expert-tensor ranks that hold different tokens (another row, another
share of the context), Megatron gathers parts of different lengths. NCCL's `all_gather` and
`reduce_scatter` take them, gloo's want equal ones; these do the same with one broadcast, or one
reduction, for each part. For CPUs only, where `device` puts them in Megatron's hands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    import torch


def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Fill parts, one a rank of the group, each of that rank's shape, from everyone's `mine`."""
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(mine)
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)


def reduce_scatter(
    mine: torch.Tensor, parts: list[torch.Tensor], *, group: dist.ProcessGroup
) -> None:
    """Fill `mine` with the sum over the group of everyone's part for this rank."""
    for rank, part in enumerate(parts):
        if not part.numel():
            continue
        total = part.clone()
        dist.reduce(total, group=group, group_dst=rank)
        if rank == group.rank():
            mine.copy_(total)

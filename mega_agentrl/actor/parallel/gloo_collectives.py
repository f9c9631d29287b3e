"""All-gather and reduce-scatter of parts of different sizes over gloo.

With expert tensor parallelism over ranks that hold different tokens, Megatron gathers parts of
different lengths. NCCL's `all_gather` and `reduce_scatter` accept them, gloo's do not; these
functions use one broadcast or reduction per part instead. `device.init_device` installs them
in Megatron on CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    import torch


def all_gather_uneven(
    parts: list[torch.Tensor], mine: torch.Tensor, *, group: dist.ProcessGroup
) -> None:
    """Fill `parts`, one per rank of the group with that rank's shape, from every rank's `mine`."""
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(mine)
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)


def reduce_scatter_uneven(
    mine: torch.Tensor, parts: list[torch.Tensor], *, group: dist.ProcessGroup
) -> None:
    """Fill `mine` with the sum over the group of all ranks' parts for this rank."""
    for rank, part in enumerate(parts):
        if not part.numel():
            continue
        total = part.clone()
        dist.reduce(total, group=group, group_dst=rank)
        if rank == group.rank():
            mine.copy_(total)

"""Jobs of trainer and rollout ranks on their GPUs, for `tests.reshard.transports.ranks`.

`take_device` comes first, before CUDA is initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from mega_agentrl.reshard.device_location import current_device_location
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.session import TransferSession, join_session
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests, SourceDigests
from tests.reshard.faults import cut
from tests.reshard.transports.ranks import ADDRESS

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.reshard.frames import PartBatch
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.topology import RankLocation
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion
    from tests.reshard.transports.ranks import Group, RankState


class DeviceWriter:
    """A `WeightWriter` into parameters in the memory of the current GPU."""

    def __init__(
        self, layout: list[ShardLayout], dtype: torch.dtype, digests: ReceivedDigests
    ) -> None:
        self.layout, self.digests = layout, digests
        self.params = {s.name: torch.zeros(s.shape, dtype=dtype, device="cuda") for s in layout}

    def write(self, batch: PartBatch, frame: torch.Tensor) -> None:
        assert frame.is_cuda, "values must stay on the GPU"
        self.digests.copy(batch, frame, self.params)


def make_session(
    group: Group,
    layouts: tuple[list[list[ShardLayout]], list[list[ShardLayout]]],
    locations: list[RankLocation],
    dtype: str,
    names: list[str],
    bucket_bytes: int,
) -> TransferSession:
    """Plan the transfer between the `layouts` of both sides; the store is that of `group`."""
    plan = plan_transfer(*layouts, locations, dtype, names=names, bucket_bytes=bucket_bytes)
    return TransferSession(
        address=ADDRESS,
        port=group.store.port,
        key="link",
        plan=plan,
        timeout_s=30.0,
        locations=tuple(locations),
    )


def take_device(rank_state: RankState, number: int, allocator: str = "") -> Any:
    """Set the allocator and the CUDA device of this rank and return its location."""
    if allocator:
        torch._C._accelerator_setAllocatorSettings(allocator)
    torch.cuda.set_device(number)
    return current_device_location()


def join(
    rank_state: RankState, session: TransferSession, layout: list[ShardLayout], rank: int
) -> None:
    rank_state.saved = [join_session(session, rank, layout), session.plan, layout]


def send(
    rank_state: RankState, folder: Path, version: int, regions: list[DigestRegion], dtype: str
) -> Any:
    """Send the weights of a folder and return the digests of this rank."""
    executor, plan, layout = rank_state.saved
    shards = {
        name: value.to("cuda", getattr(torch, dtype))
        for name, value in cut(layout, load_file(folder / "model.safetensors")).items()
    }
    source_digests = SourceDigests(layout, regions, plan.dtype_of)
    executor.send(shards, version, source_digests.make_copy_fn())
    return source_digests.compute(shards.__getitem__)


def receive(rank_state: RankState, version: int, dtype: str) -> None:
    """Receive one version into a new `DeviceWriter`, which becomes `saved[3]`."""
    executor, plan, layout = rank_state.saved[:3]
    writer = DeviceWriter(layout, getattr(torch, dtype), ReceivedDigests(layout, plan.dtype_of))
    executor.receive(writer, version)
    writer.digests.compute((shard, writer.params[shard.name]) for shard in layout)
    rank_state.saved[3:] = [writer]


def mismatches(rank_state: RankState, expected: Any) -> list[DigestRegion]:
    """Return the regions whose digests differ from those of the trainer."""
    return rank_state.saved[3].digests.find_mismatches(expected)


def spoil(rank_state: RankState, name: str) -> None:
    """Flip one bit of a parameter and recompute the digests."""
    writer = rank_state.saved[3]
    writer.params[name].view(torch.uint8).view(-1)[5:6].bitwise_xor_(1)
    writer.digests.reset()
    writer.digests.compute((shard, writer.params[shard.name]) for shard in writer.layout)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the values as integers of the same size."""
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.contiguous().cpu().view(kind).numpy()


def bits(rank_state: RankState) -> dict[str, np.ndarray]:
    """Return the bits of all parameters by name."""
    return {name: bits_of(value) for name, value in rank_state.saved[3].params.items()}


def leave(rank_state: RankState) -> None:
    rank_state.saved[0].close()
    rank_state.saved = []

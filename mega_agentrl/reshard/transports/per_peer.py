"""Selects the best transport to each peer by the locations of the two ranks.

    same GPU                         shared device memory
    same machine, both without GPU   shared host memory
    two GPUs                         NCCL
    anything else                    gloo, with device memory staged through the host

The slots of a rank are of one kind, GPU or host memory, and serve all its transports.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.topology import LinkType, link_type_between
from mega_agentrl.reshard.transports.gloo import GlooTransport
from mega_agentrl.reshard.transports.host_staged import HostStagedTransport
from mega_agentrl.reshard.transports.memory_handles import CudaIpcMemory, MemfdMemory
from mega_agentrl.reshard.transports.nccl import NcclTransport
from mega_agentrl.reshard.transports.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.topology import RankLocation
    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport


class TransportKind(StrEnum):
    """Technology that connects two ranks."""

    shared_memory = "shared_memory"
    nccl = "nccl"
    gloo = "gloo"


def transport_kind_between(one: RankLocation, other: RankLocation) -> TransportKind:
    """Return the transport for two ranks, by the table of this module."""
    link = link_type_between(one, other)
    num_devices = (one.device is not None) + (other.device is not None)
    if link is LinkType.same_gpu or (link is LinkType.same_node and num_devices == 0):
        return TransportKind.shared_memory
    return TransportKind.nccl if num_devices == 2 else TransportKind.gloo


class PerPeerTransport:
    """Transport of one rank that delegates to one transport per peer.

    Args:
        by_peer: Transport to each peer.
        slot_owner: Transport whose slots all others can use.
    """

    def __init__(self, by_peer: Mapping[int, Transport], slot_owner: Transport) -> None:
        self._by_peer, self._slot_owner = by_peer, slot_owner
        self.needs_exact_size = any(transport.needs_exact_size for transport in by_peer.values())
        self._slot_by_address: dict[int, torch.Tensor] = {}

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:  # noqa: D102
        slots = self._slot_owner.allocate_slots(count, num_bytes)
        self._slot_by_address = {slot.data_ptr(): slot for slot in slots}
        return slots

    def send(self, frame: torch.Tensor, peer: int) -> SendHandle:  # noqa: D102
        return self._by_peer[peer].send(frame, peer)

    def receive(self, slot: torch.Tensor, peer: int) -> RecvHandle:
        """Start receiving; transports that need no exact size get the whole slot."""
        transport = self._by_peer[peer]
        if not transport.needs_exact_size:
            slot = self._slot_by_address.get(slot.data_ptr(), slot)
        return transport.receive(slot, peer)

    def close(self) -> None:  # noqa: D102
        for transport in {
            id(transport): transport for transport in (*self._by_peer.values(), self._slot_owner)
        }.values():
            transport.close()
        self._slot_by_address = {}


def join_transport(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    locations: Sequence[RankLocation] = (),
    hops: Iterable[tuple[int, int]] = (),
) -> Transport:
    """Connect to all other ranks.

    Args:
        store: Where the ranks meet.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_s: Deadline for meeting, and for control messages afterwards.
        locations: Locations of all ranks; without any, all links use gloo.
        hops: (source, target) of all frames that will be sent, the same on all ranks.

    Raises:
        RuntimeError: If not all ranks arrive by the deadline.
        ValueError: If the number of locations is not the number of ranks.
    """
    if locations and len(locations) != world_size:
        raise ValueError(
            f"join_transport: {len(locations)} locations, expected {world_size}, one per rank"
        )
    gloo = GlooTransport.join(store, rank, world_size, timeout_s)
    if not locations:
        return gloo
    peers = [peer for peer in range(world_size) if peer != rank]
    kinds = {peer: transport_kind_between(locations[rank], locations[peer]) for peer in peers}
    on_device = locations[rank].device is not None
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else None
    shared_memory = SharedMemoryTransport(
        gloo, MemfdMemory() if device is None else CudaIpcMemory(device), timeout_s
    )
    transports: dict[TransportKind, Transport] = {
        TransportKind.shared_memory: shared_memory,
        TransportKind.gloo: gloo if device is None else HostStagedTransport(gloo),
    }
    if device is not None and TransportKind.nccl in kinds.values():
        transports[TransportKind.nccl] = NcclTransport.join(
            store,
            rank,
            world_size,
            timeout_s,
            device=device,
            hops=[hop for hop in hops if _uses_nccl(locations, hop)],
            control=gloo,
        )
    return PerPeerTransport({peer: transports[kind] for peer, kind in kinds.items()}, shared_memory)


def _uses_nccl(locations: Sequence[RankLocation], hop: tuple[int, int]) -> bool:
    source, target = hop
    return transport_kind_between(locations[source], locations[target]) is TransportKind.nccl

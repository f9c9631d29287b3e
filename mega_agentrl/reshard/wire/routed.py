"""The best wire to each peer, by where both stand.

    same GPU                         mapped device memory
    same machine, both without GPU   mapped host memory
    two GPUs                         NCCL
    anything else                    gloo, from device memory through the host's

The slots of a rank are of one kind, its GPU's memory or the host's, and serve all its wires.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.links import Link, link_between
from mega_agentrl.reshard.wire.gloo import GlooWire
from mega_agentrl.reshard.wire.mapped import MappedWire
from mega_agentrl.reshard.wire.memory import DeviceMemory, HostMemory
from mega_agentrl.reshard.wire.nccl import NcclWire
from mega_agentrl.reshard.wire.staged import StagedWire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.links import Location
    from mega_agentrl.reshard.wire.ends import Arrival, Departure, Wire


class Route(StrEnum):
    """Technology between two ranks."""

    mapped = "mapped"
    nccl = "nccl"
    gloo = "gloo"


def route_between(one: Location, other: Location) -> Route:
    """See the module."""
    link = link_between(one, other)
    num_devices = (one.device is not None) + (other.device is not None)
    if link is Link.same_gpu or (link is Link.same_node and num_devices == 0):
        return Route.mapped
    return Route.nccl if num_devices == 2 else Route.gloo


class RoutedWire:
    """One rank's end. by_peer: the wire to each. home: the one whose slots all others can use."""

    def __init__(self, by_peer: Mapping[int, Wire], home: Wire) -> None:
        self._by_peer, self._home = by_peer, home
        self.exact = any(wire.exact for wire in by_peer.values())
        self._whole: dict[int, torch.Tensor] = {}

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`."""
        slots = self._home.slots(count, num_bytes)
        self._whole = {slot.data_ptr(): slot for slot in slots}
        return slots

    def send(self, frame: torch.Tensor, peer: int) -> Departure:
        """See `Wire.send`."""
        return self._by_peer[peer].send(frame, peer)

    def receive(self, slot: torch.Tensor, peer: int) -> Arrival:
        """See `Wire.receive`; wires that are not exact get the whole slot."""
        wire = self._by_peer[peer]
        if not wire.exact:
            slot = self._whole.get(slot.data_ptr(), slot)
        return wire.receive(slot, peer)

    def close(self) -> None:
        """See `Wire.close`."""
        for wire in {id(wire): wire for wire in (*self._by_peer.values(), self._home)}.values():
            wire.close()
        self._whole = {}


def join_wire(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    locations: Sequence[Location] = (),
    hops: Iterable[tuple[int, int]] = (),
) -> Wire:
    """Meet all other ranks. locations: of all of them; without any, all links are gloo. hops:
    (source, target) of all frames there will be, the same on all ranks.

    Raises `RuntimeError` at the deadline, `ValueError` for locations of other ranks.
    """
    if locations and len(locations) != world_size:
        raise ValueError(f"wires: {len(locations)} locations, expected {world_size}, one a rank")
    gloo = GlooWire.join(store, rank, world_size, timeout_s)
    if not locations:
        return gloo
    peers = [peer for peer in range(world_size) if peer != rank]
    routes = {peer: route_between(locations[rank], locations[peer]) for peer in peers}
    on_device = locations[rank].device is not None
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else None
    mapped = MappedWire(gloo, HostMemory() if device is None else DeviceMemory(device), timeout_s)
    wires: dict[Route, Wire] = {
        Route.mapped: mapped,
        Route.gloo: gloo if device is None else StagedWire(gloo),
    }
    if device is not None and Route.nccl in routes.values():
        wires[Route.nccl] = NcclWire.join(
            store,
            rank,
            world_size,
            timeout_s,
            device=device,
            hops=[hop for hop in hops if _is_nccl(locations, hop)],
            control=gloo,
        )
    return RoutedWire({peer: wires[route] for peer, route in routes.items()}, mapped)


def _is_nccl(locations: Sequence[Location], hop: tuple[int, int]) -> bool:
    source, target = hop
    return route_between(locations[source], locations[target]) is Route.nccl

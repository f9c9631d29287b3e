"""Registry of the transports: which of them connects two ranks, and how a rank joins it.

    nccl            ranks on two GPUs
    shared_memory   ranks on one machine, both with a GPU or both without
    gloo            any two ranks; device memory is staged through the host

With `weight_sync.transport=auto` each pair of ranks uses the first transport of `TRANSPORTS` that
connects it. Any other value names the one transport that all frames of a session use, for example
gloo on a cluster where NCCL does not work. With shared memory a rank reads the memory of other GPUs
of its machine, for which they need peer access, and no communicator is created. The slots of a rank
are of one kind, GPU or host memory, and serve all its transports.

To add one:

1. Write its module; `base` has the interface, which `test_all_transports.py` checks.
2. Add its name to `config.enums.TransportKind`; run `python tools/make_config_reference.py`.
3. Add its row to `TRANSPORTS`, by preference, and its pairs to `test_registry.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.topology import LinkType, link_type_between
from mega_agentrl.reshard.transports.gloo import GlooTransport, HostStagedTransport
from mega_agentrl.reshard.transports.memory_handles import CudaIpcMemory, MemfdMemory
from mega_agentrl.reshard.transports.nccl import NcclTransport
from mega_agentrl.reshard.transports.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.planner.transfer_plan import Hop, TransferPlan
    from mega_agentrl.reshard.topology import RankLocation
    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinContext:
    """Arguments of `TransportEntry.join`."""

    store: Store
    """Where the ranks meet."""
    rank: int
    world_size: int
    timeout_s: float
    """Deadline for meeting, and for control messages afterwards."""
    device: torch.device | None
    """GPU of this process, or None without one."""
    hops: Sequence[tuple[int, int]]
    """(source, target) of all frames that the transport will carry to or from this rank."""
    gloo: GlooTransport
    """Connects the rank with its peers; for control messages and host memory."""
    shared_memory: SharedMemoryTransport
    """Owns the slots of the rank."""


@dataclass(frozen=True, slots=True)
class TransportEntry:
    """A transport in the registry."""

    connects: Callable[[RankLocation, RankLocation], bool]
    """Whether the transport can connect two ranks."""
    join: Callable[[JoinContext], Transport]
    """Connects a rank to its peers."""


def _shares_memory(first: RankLocation, second: RankLocation) -> bool:
    is_one_kind = (first.device is None) == (second.device is None)
    return is_one_kind and link_type_between(first, second) is not LinkType.network


def _has_two_gpus(first: RankLocation, second: RankLocation) -> bool:
    on_gpus = first.device is not None and second.device is not None
    return on_gpus and link_type_between(first, second) is not LinkType.same_gpu


def _join_nccl(context: JoinContext) -> Transport:
    assert context.device is not None, "NCCL connects only ranks with a GPU"
    return NcclTransport.join(
        context.store,
        context.rank,
        context.world_size,
        context.timeout_s,
        device=context.device,
        hops=context.hops,
        control=context.gloo,
    )


def _join_gloo(context: JoinContext) -> Transport:
    return context.gloo if context.device is None else HostStagedTransport(context.gloo)


TRANSPORTS: Mapping[TransportKind, TransportEntry] = {
    TransportKind.nccl: TransportEntry(_has_two_gpus, _join_nccl),
    TransportKind.shared_memory: TransportEntry(
        _shares_memory, lambda context: context.shared_memory
    ),
    TransportKind.gloo: TransportEntry(lambda first, second: True, _join_gloo),
}
"""All transports, by preference."""


def transport_kind_between(
    first: RankLocation, second: RankLocation, chosen: TransportKind = TransportKind.auto
) -> TransportKind:
    """Return the chosen transport if it connects the two ranks, else the first that does."""
    if chosen is not TransportKind.auto and TRANSPORTS[chosen].connects(first, second):
        return chosen
    return next(kind for kind, entry in TRANSPORTS.items() if entry.connects(first, second))


def bytes_by_transport(
    plan: TransferPlan, locations: Sequence[RankLocation], chosen: TransportKind
) -> dict[str, int]:
    """Return the bytes that each transport carries in one transfer of a plan, by its name."""
    bytes_of_hop: Counter[Hop] = Counter()
    for bucket in plan.buckets:
        for hop in bucket.hops:
            bytes_of_hop[hop] += bucket.num_bytes
    result: Counter[TransportKind] = Counter()
    for (source, target), num_bytes in bytes_of_hop.items():
        result[transport_kind_between(locations[source], locations[target], chosen)] += num_bytes
    return {kind.value: result[kind] for kind in TRANSPORTS if result[kind]}


def check_transport(
    chosen: TransportKind, locations: Sequence[RankLocation], hops: Iterable[tuple[int, int]]
) -> None:
    """Raise a `ConfigError` if the chosen transport cannot carry one of the hops."""
    if chosen is TransportKind.auto or (chosen is TransportKind.gloo and not locations):
        return
    for source, target in hops:
        if not locations or not TRANSPORTS[chosen].connects(locations[source], locations[target]):
            places = f"{locations[source]} and {locations[target]}" if locations else "unknown"
            raise ConfigError(
                "weight_sync.transport",
                chosen,
                f"auto, or a transport that connects ranks {source} and {target} ({places})",
                "a transport chosen for another placement of the ranks",
            )


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
    hops: Iterable[tuple[int, int]],
    locations: Sequence[RankLocation] = (),
    chosen: TransportKind = TransportKind.auto,
) -> Transport:
    """Connect to the ranks that this one exchanges frames with.

    Args:
        store: Where the ranks meet.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_s: Deadline for meeting, and for control messages afterwards.
        hops: (source, target) of all frames that the rank will send or receive; others may be
            missing.
        locations: Locations of all ranks; without any, all links use gloo.
        chosen: Transport of all hops, which must connect them (`check_transport`), or auto.

    Raises:
        RuntimeError: If a peer does not arrive by the deadline.
        ValueError: If the number of locations is not the number of ranks.
    """
    if locations and len(locations) != world_size:
        raise InputError("number of locations", len(locations), f"{world_size}, one per rank")
    own_hops = {hop for hop in hops if rank in hop}
    peers = {source + target - rank for source, target in own_hops}
    gloo = GlooTransport.join(store, rank, world_size, timeout_s, peers=peers)
    on_device = bool(locations) and locations[rank].device is not None
    if not locations or (chosen is TransportKind.gloo and not on_device):
        return gloo
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else None
    shared_memory = SharedMemoryTransport(
        gloo, MemfdMemory() if device is None else CudaIpcMemory(device), timeout_s
    )
    kind_of_peer = {
        peer: transport_kind_between(locations[rank], locations[peer], chosen) for peer in peers
    }
    transports = {
        kind: entry.join(
            JoinContext(
                store=store,
                rank=rank,
                world_size=world_size,
                timeout_s=timeout_s,
                device=device,
                hops=[hop for hop in own_hops if kind_of_peer[sum(hop) - rank] is kind],
                gloo=gloo,
                shared_memory=shared_memory,
            )
        )
        for kind, entry in TRANSPORTS.items()
        if kind in kind_of_peer.values()
    }
    by_peer = {peer: transports[kind] for peer, kind in kind_of_peer.items()}
    return PerPeerTransport(by_peer, shared_memory)

"""How the ranks of a plan meet: one process group of their own over a TCP store.

All ranks, trainer ranks first and rollout ranks after them, join a link; the default groups of
neither side are touched. A link belongs to one plan. Where the membership changes, the ranks of
the new plan join a new link, by another key at the same store.

    rank 0     store = open_store(address, timeout_s)
               link = WeightLink(address=address, port=store.port, plan=plan, ...)
    any rank   courier = join(link, rank, layout, store=store if rank == 0 else None)

`join` returns when all ranks of the plan have joined.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mega_agentrl.reshard.courier import Courier
from mega_agentrl.reshard.wire.routed import join_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.delivery import DeliveryPlan
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.links import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLink:
    """All that a rank needs to take part.

    key: of this link at the store. timeout_s: of every wait. first_sink: number of the first
    worker of the engine that this link is given to. locations: of all ranks, to pick the wire
    between each two by; without any, all are gloo.
    """

    address: str
    port: int
    key: str
    plan: DeliveryPlan
    timeout_s: float
    first_sink: int = 0
    locations: tuple[Location, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Values that any serializer takes."""
        return {"link": pickle.dumps(self)}

    @classmethod
    def from_plain(cls, link: bytes) -> WeightLink:
        """Undo `to_plain`; only for bytes from our own driver."""
        restored: WeightLink = pickle.loads(link)
        return restored


def open_store(address: str, timeout_s: float) -> TCPStore:
    """The meeting point, on a free port; the process that opens it must stay alive."""
    return TCPStore(
        address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join(
    link: WeightLink,
    rank: int,
    layout: Sequence[ShardLayout],
    *,
    store: TCPStore | None = None,
) -> Courier:
    """Meet all other ranks. store: the one this process has opened, if it has.

    Raises `RuntimeError` naming the ranks that did not come, and `ValueError` for a plan that
    was made from another layout or locations of another number of ranks.
    """
    world_size = link.plan.world_size
    try:
        if store is None:
            timeout = timedelta(seconds=link.timeout_s)
            store = TCPStore(link.address, link.port, is_master=False, timeout=timeout)
        keyed = PrefixStore(link.key, store)
        keyed.set(f"here/{rank}", "1")
        hops = {hop for bucket in link.plan.buckets for hop in bucket.hops}
        wire = join_wire(
            keyed, rank, world_size, link.timeout_s, locations=link.locations, hops=hops
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} of the weight transfer: the {world_size} ranks did not meet at "
            f"{link.address}:{link.port} within {link.timeout_s:g} s{_absent(link, store)}: {error}"
        ) from error
    try:
        return Courier(link.plan, rank, wire, layout, link.timeout_s)
    except ValueError as error:
        wire.close()
        raise ValueError(f"rank {rank} of the weight transfer: {error}") from error


def _absent(link: WeightLink, store: TCPStore | None) -> str:
    """Who is missing, as far as the store can still tell."""
    if store is None:
        return "; the meeting point did not answer"
    keyed = PrefixStore(link.key, store)
    try:
        away = [r for r in range(link.plan.world_size) if not keyed.check([f"here/{r}"])]
    except RuntimeError:
        return "; the meeting point is gone"
    return f"; missing: rank {', '.join(map(str, away))}" if away else ""

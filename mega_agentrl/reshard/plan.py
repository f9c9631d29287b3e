"""Makes the plan of a weight update from what every rank has. Pure and deterministic.

    layouts of both sides -> regions -> lanes -> buckets with hops, in order -> checked plan

Each rollout rank gets exactly the elements of its own shards, once; no rank assembles a whole
tensor. Every rank makes the same plan from the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.delivery import ITEM_BYTES, DeliveryPlan
from mega_agentrl.reshard.delivery_check import check_delivery
from mega_agentrl.reshard.fan_out import Dispatcher, make_parcels
from mega_agentrl.reshard.lanes import gather, least_network_bytes
from mega_agentrl.reshard.layout import ShardLayout, check_disjoint
from mega_agentrl.reshard.links import LinkSpeeds
from mega_agentrl.reshard.regions import RankSets, owned, regions

if TYPE_CHECKING:
    from mega_agentrl.reshard.links import Location
    from mega_agentrl.reshard.regions import Owned

Layouts = Sequence[Sequence[ShardLayout]]
"""Shards by rank; ranks with equal shards may share one object."""


def plan_delivery(
    sources: Layouts,
    sinks: Layouts,
    locations: Sequence[Location],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    bucket_bytes: int = 64 * 2**20,
    speeds: LinkSpeeds | None = None,
) -> DeliveryPlan:
    """Plan a full update.

    sources: of every trainer rank. sinks: of every rollout rank, engine after engine. locations:
    of all ranks, trainer ranks first. names: of all tensors of the model. dtypes: in which a
    tensor travels, by name, or one for all. bucket_bytes: size of a bucket at most, unless one
    row is larger. speeds: what the order is made for. Raises `ValueError` for a tensor or part
    of one that is wanted and not held, an element of a rollout shard that would be written
    twice, a type that is unknown, and numbers that do not fit.
    """
    if len(locations) != len(sources) + len(sinks) or bucket_bytes < 1:
        raise ValueError(
            f"plan_delivery: {len(locations)} locations, bucket_bytes={bucket_bytes}; expected "
            f"{len(sources)} + {len(sinks)} locations, one per rank, and at least one byte"
        )
    _check_written_once(sinks)
    sets = RankSets()
    held = owned(sources, sets)
    wanted = owned(sinks, sets, first_rank=len(sources))
    plan = plan_owned(
        held, wanted, sets, locations, dtypes,
        names=names, num_sources=len(sources), bucket_bytes=bucket_bytes, speeds=speeds,
    )  # fmt: skip
    check_delivery(plan, sources, sinks)
    return plan


def plan_owned(
    held: Owned,
    wanted: Owned,
    sets: RankSets,
    locations: Sequence[Location],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    num_sources: int,
    bucket_bytes: int,
    speeds: LinkSpeeds | None = None,
) -> DeliveryPlan:
    """The same from tables of who owns what, unchecked: for thousands of ranks that are alike."""
    dtype_of = {name: _dtype_of(name, dtypes) for name in names}
    item_bytes = {name: ITEM_BYTES[dtype] for name, dtype in dtype_of.items()}
    lanes = gather(regions(names, held, wanted, sets), item_bytes)
    parcels = make_parcels(lanes, locations, bucket_bytes)
    return DeliveryPlan(
        num_sources=num_sources,
        num_sinks=len(locations) - num_sources,
        dtype_of=dtype_of,
        buckets=Dispatcher(locations, speeds or LinkSpeeds()).dispatch(parcels),
        least_network_bytes=least_network_bytes(lanes, locations),
    )


def _check_written_once(sinks: Layouts) -> None:
    for layout in {id(layout): layout for layout in sinks}.values():
        for shard in layout:
            local = [block.local_rect for block in shard.blocks]
            check_disjoint(shard.name, local, owner="delivery plan, a rollout rank")


def _dtype_of(name: str, dtypes: Mapping[str, str] | str) -> str:
    dtype = dtypes if isinstance(dtypes, str) else dtypes.get(name, "none")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: dtype={dtype}, expected one of {', '.join(ITEM_BYTES)}")
    return dtype

"""Plans a link between trainer ranks and engines: the transfer, and what each side verifies.

The driver plans a new link whenever the engines change. Ranks send their shards packed
(`layout.PackedLayout`); equal ones become one object, and everything that follows from layouts
alone (transfer groups, digest regions) is computed once and cached. A link with a replaced engine
therefore only needs new hops, and a link with the layouts and locations of an earlier link is taken
from the cache.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mega_agentrl.reshard.layout import ShardLayout, distinct_layouts
from mega_agentrl.reshard.planner.planner import (
    check_transfer_plan,
    group_layouts,
    plan_from_groups,
)
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestVerifier,
    RegionIndex,
    collect_regions,
    regions_of_layout,
)

if TYPE_CHECKING:
    import numpy as np

    from mega_agentrl.reshard.layout import PackedLayout
    from mega_agentrl.reshard.planner.transfer_groups import TransferGroup
    from mega_agentrl.reshard.planner.transfer_plan import TransferPlan
    from mega_agentrl.reshard.topology import RankLocation

_MAX_CACHED_LINKS = 4
"""Number of cached plans, for the link to all engines and links without some of them."""

Layout = Sequence[ShardLayout]


@dataclass(frozen=True, slots=True)
class _Sides:
    """The parts of a plan that depend only on the layouts of both sides.

    Links that differ only in their number of engines share an instance.
    """

    trainer_layouts: Sequence[Layout]
    """Shards of every trainer rank."""
    rollout_layouts: Sequence[Layout]
    """Distinct shards of rollout ranks."""
    groups: list[TransferGroup]
    """Transfer groups for one rollout rank with each of the distinct shards."""
    verifier: DigestVerifier
    trainer_regions: list[bytes]
    region_indices: dict[int, np.ndarray]
    """Rows of the regions of a rollout rank, by id of its shards."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Plan of a link for the driver and all ranks; equal parts of it are one object."""

    plan: TransferPlan
    trainer_plans: list[TransferPlan]
    """Part of the plan of each trainer rank."""
    engine_plans: list[TransferPlan]
    """Part of the plan of each engine."""
    trainer_regions: list[bytes]
    """Regions whose digests each trainer rank computes, pickled once for all links."""
    region_indices: list[np.ndarray]
    """By rollout rank, the rows of its regions in the result of `verifier.expected_digests`."""
    verifier: DigestVerifier


class LinkPlanner:
    """Plans links for one model, and caches results for later links.

    Args:
        names: Names of all tensors of the model, layer by layer.
        dtype: Dtype in which weights are sent.
        bucket_bytes: Maximum bucket size.
    """

    def __init__(self, names: Sequence[str], dtype: str, bucket_bytes: int) -> None:
        self._names, self._dtype, self._bucket_bytes = list(names), dtype, bucket_bytes
        self._layouts: dict[bytes, list[ShardLayout]] = {}
        self._sides: dict[Any, _Sides] = {}
        self._links: dict[Any, LinkPlan] = {}

    def unpack(self, packed: PackedLayout) -> list[ShardLayout]:
        """Return a rank's shards, the same object for equal ones."""
        if packed.digest not in self._layouts:
            self._layouts[packed.digest] = packed.unpack()
        return self._layouts[packed.digest]

    def plan(
        self,
        trainer_layouts: Sequence[Layout],
        engine_layouts: Sequence[Sequence[Layout]],
        locations: Sequence[RankLocation],
    ) -> LinkPlan:
        """Plan a link.

        Args:
            trainer_layouts: Shards of every trainer rank, from `unpack`.
            engine_layouts: Shards of every worker of every engine, from `unpack`.
            locations: Locations of all ranks, trainer ranks first.

        Raises:
            ValueError: If the layouts of the two sides do not fit together.
        """
        rollout_layouts = [layout for engine in engine_layouts for layout in engine]
        distinct = distinct_layouts(rollout_layouts)
        sides = (tuple(map(id, trainer_layouts)), tuple(map(id, distinct)))
        key = (sides, tuple(tuple(map(id, engine)) for engine in engine_layouts), tuple(locations))
        if key not in self._links:
            if sides not in self._sides:
                _store(self._sides, sides, self._describe_sides(trainer_layouts, distinct))
            link_plan = self._plan_hops(self._sides[sides], engine_layouts, locations)
            _store(self._links, key, link_plan)
        return self._links[key]

    def _describe_sides(
        self, trainer_layouts: Sequence[Layout], distinct: Sequence[Layout]
    ) -> _Sides:
        groups = group_layouts(trainer_layouts, distinct, self._dtype, names=self._names)
        regions = collect_regions(distinct)
        verifier, region_index = DigestVerifier(trainer_layouts, regions), RegionIndex(regions)
        trainer_regions = {
            id(layout): pickle.dumps(region_index.regions_of(layout))
            for layout in distinct_layouts(trainer_layouts)
        }
        return _Sides(
            trainer_layouts,
            distinct,
            groups,
            verifier,
            [trainer_regions[id(layout)] for layout in trainer_layouts],
            {id(layout): verifier.region_indices(regions_of_layout(layout)) for layout in distinct},
        )

    def _plan_hops(
        self,
        sides: _Sides,
        engine_layouts: Sequence[Sequence[Layout]],
        locations: Sequence[RankLocation],
    ) -> LinkPlan:
        num_trainer_ranks = len(sides.trainer_layouts)
        rollout_layouts = [layout for engine in engine_layouts for layout in engine]
        plan = plan_from_groups(
            _with_receivers(sides, rollout_layouts),
            locations,
            self._dtype,
            names=self._names,
            num_trainer_ranks=num_trainer_ranks,
            bucket_bytes=self._bucket_bytes,
        )
        check_transfer_plan(plan, sides.trainer_layouts, rollout_layouts)
        # Engines with equal shards receive the same buckets, so they share a part of the plan.
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        engine_of: dict[tuple[int, ...], Sequence[Layout]] = {}
        keys, first_rank = [], num_trainer_ranks
        for engine in engine_layouts:
            keys.append(tuple(map(id, engine)))
            engine_of[keys[-1]] = engine
            members[keys[-1]] += range(first_rank, first_rank + len(engine))
            first_rank += len(engine)
        names_of = {
            id(layout): _hf_names([layout]) for layout in distinct_layouts(sides.trainer_layouts)
        }
        parts = plan.split(
            [*([rank] for rank in range(num_trainer_ranks)), *members.values()],
            [
                *(names_of[id(layout)] for layout in sides.trainer_layouts),
                *(_hf_names(engine_of[key]) for key in members),
            ],
        )
        part_of = dict(zip(members, parts[num_trainer_ranks:], strict=True))
        return LinkPlan(
            plan,
            parts[:num_trainer_ranks],
            [part_of[key] for key in keys],
            sides.trainer_regions,
            [sides.region_indices[id(layout)] for layout in rollout_layouts],
            sides.verifier,
        )


def _with_receivers(sides: _Sides, rollout_layouts: Sequence[Layout]) -> list[TransferGroup]:
    """Return the groups with the rollout ranks of a link as receivers."""
    first_rank = len(sides.trainer_layouts)
    number_of = {id(layout): n for n, layout in enumerate(sides.rollout_layouts, first_rank)}
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, layout in enumerate(rollout_layouts, first_rank):
        ranks_of[number_of[id(layout)]].append(rank)
    receivers: dict[tuple[int, ...], tuple[int, ...]] = {}
    groups = []
    for group in sides.groups:
        if group.receivers not in receivers:
            ranks = (rank for number in group.receivers for rank in ranks_of[number])
            receivers[group.receivers] = tuple(sorted(ranks))
        groups.append(replace(group, receivers=receivers[group.receivers]))
    return groups


def _hf_names(layouts: Sequence[Layout]) -> set[str]:
    return {block.hf_name for layout in layouts for shard in layout for block in shard.blocks}


def _store(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry and drop the oldest one of a full cache."""
    if len(cache) == _MAX_CACHED_LINKS:
        del cache[next(iter(cache))]
    cache[key] = value

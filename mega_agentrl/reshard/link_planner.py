"""Plans a link between trainer ranks and engines: the transfer, and what each side verifies.

The driver plans a new link whenever the engines change. Ranks send their shards packed
(`layout.PackedLayout`); equal ones become one object, and everything that follows from layouts
alone (transfer groups, digest regions) is computed once and kept. So a link with a replaced engine
only needs new hops, and a link with the ranks and locations of an earlier one needs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.reshard.layout import ShardLayout
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
    from mega_agentrl.reshard.verify.digest_verifier import DigestRegion

_MAX_CACHED_LINKS = 4
"""Sets of ranks, and plans, whose results are kept: all engines, and some without the others."""

Layout = list[ShardLayout]


@dataclass(frozen=True, slots=True)
class _RankSet:
    """What follows from the layouts of all ranks of a link."""

    groups: list[TransferGroup]
    verifier: DigestVerifier
    trainer_regions: list[list[DigestRegion]]
    region_indices: list[np.ndarray]
    layouts: tuple[list[Layout], list[list[Layout]]]
    """Kept, because the ids of these objects are the key of the cache."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Everything that the ranks of a link and the driver need. Equal parts are one object."""

    plan: TransferPlan
    trainer_plans: list[TransferPlan]
    """Part of the plan of each trainer rank."""
    engine_plans: list[TransferPlan]
    """Part of the plan of each engine."""
    trainer_regions: list[list[DigestRegion]]
    """Regions whose digests each trainer rank computes."""
    region_indices: list[np.ndarray]
    """By rollout rank, the rows of its regions in the result of `verifier.expected_digests`."""
    verifier: DigestVerifier


class LinkPlanner:
    """Plans links for one model, and keeps what later links can use again.

    Args:
        names: Names of all tensors of the model, layer by layer.
        dtype: Dtype in which weights are sent.
        bucket_bytes: Maximum bucket size.
    """

    def __init__(self, names: Sequence[str], dtype: str, bucket_bytes: int) -> None:
        self._names, self._dtype, self._bucket_bytes = list(names), dtype, bucket_bytes
        self._layouts: dict[bytes, Layout] = {}
        self._rank_sets: dict[tuple[tuple[int, ...], ...], _RankSet] = {}
        self._plans: dict[Any, LinkPlan] = {}

    def unpack(self, packed: PackedLayout) -> Layout:
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
            ValueError: The layouts of the two sides do not fit together.
        """
        ranks = (
            tuple(map(id, trainer_layouts)),
            *(tuple(map(id, engine)) for engine in engine_layouts),
        )
        key = (ranks, tuple(locations))
        if key not in self._plans:
            if ranks not in self._rank_sets:
                rank_set = self._describe_ranks(
                    list(trainer_layouts), list(map(list, engine_layouts))
                )
                _store(self._rank_sets, ranks, rank_set)
            _store(self._plans, key, self._plan_hops(self._rank_sets[ranks], locations))
        return self._plans[key]

    def _describe_ranks(
        self, trainer_layouts: list[Layout], engine_layouts: list[list[Layout]]
    ) -> _RankSet:
        rollout_layouts = [layout for engine in engine_layouts for layout in engine]
        groups = group_layouts(trainer_layouts, rollout_layouts, self._dtype, names=self._names)
        regions = collect_regions(rollout_layouts)
        verifier, region_index = DigestVerifier(trainer_layouts, regions), RegionIndex(regions)
        held = {id(layout): layout for layout in trainer_layouts}
        trainer_regions = {
            key: region_index.of_held_tensors(layout) for key, layout in held.items()
        }
        needed = {id(layout): layout for layout in rollout_layouts}
        indices = {
            key: verifier.region_indices(regions_of_layout(layout))
            for key, layout in needed.items()
        }
        return _RankSet(
            groups,
            verifier,
            [trainer_regions[id(layout)] for layout in trainer_layouts],
            [indices[id(layout)] for layout in rollout_layouts],
            (trainer_layouts, engine_layouts),
        )

    def _plan_hops(self, rank_set: _RankSet, locations: Sequence[RankLocation]) -> LinkPlan:
        trainer_layouts, engine_layouts = rank_set.layouts
        num_trainer_ranks = len(trainer_layouts)
        plan = plan_from_groups(
            rank_set.groups,
            locations,
            self._dtype,
            names=self._names,
            num_trainer_ranks=num_trainer_ranks,
            bucket_bytes=self._bucket_bytes,
        )
        rollout_layouts = [layout for engine in engine_layouts for layout in engine]
        check_transfer_plan(plan, trainer_layouts, rollout_layouts)
        # Engines with equal shards receive the same buckets, so they share a part of the plan.
        names_of = {id(layout): _names([layout]) for layout in trainer_layouts}
        members: dict[tuple[int, ...], list[int]] = {}
        engine_of: dict[tuple[int, ...], list[Layout]] = {}
        keys, first_rank = [], num_trainer_ranks
        for engine in engine_layouts:
            keys.append(tuple(map(id, engine)))
            engine_of[keys[-1]] = engine
            members.setdefault(keys[-1], []).extend(range(first_rank, first_rank + len(engine)))
            first_rank += len(engine)
        parts = plan.split(
            [*([rank] for rank in range(num_trainer_ranks)), *members.values()],
            [
                *(names_of[id(layout)] for layout in trainer_layouts),
                *map(_names, engine_of.values()),
            ],
        )
        part_of = dict(zip(members, parts[num_trainer_ranks:], strict=True))
        return LinkPlan(
            plan,
            parts[:num_trainer_ranks],
            [part_of[key] for key in keys],
            rank_set.trainer_regions,
            rank_set.region_indices,
            rank_set.verifier,
        )


def _names(layouts: Sequence[Layout]) -> set[str]:
    return {block.hf_name for layout in layouts for shard in layout for block in shard.blocks}


def _store(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry and drop the oldest one of a full cache."""
    if len(cache) == _MAX_CACHED_LINKS:
        del cache[next(iter(cache))]
    cache[key] = value

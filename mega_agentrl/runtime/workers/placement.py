"""Placement of the policy ranks: every tensor-parallel group inside one node.

A tensor-parallel group communicates in every layer, so it must not span nodes. Each group is one
bundle of a placement group, and Ray puts a bundle on a single node.

Engines that share the policy's GPUs (`cluster.colocated`) go into the bundles of the ranks whose
GPUs they use, and a bundle then holds whole engines. In Ray's accounting each rank owns one GPU and
an engine owns none; the engine gets the names of its GPUs instead, because Ray's fractional GPUs
could put two ranks on one GPU and cannot give an actor fractions of several. An engine with GPUs of
its own is one Ray actor, which starts its workers on the same node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mega_agentrl.config.checks.parallel import min_ranks_per_node

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.policy import ParallelConfig

_PLACEMENT_TIMEOUT_S = 120.0


def placement_bundles(
    layout: ParallelConfig,
    *,
    on_gpu: bool,
    size: int | None = None,
    num_engines: int = 0,
    engine_ranks: int = 1,
) -> list[dict[str, float]]:
    """Return the resources of each bundle in rank order (tensor rank varies fastest).

    Args:
        layout: Parallel layout of the policy.
        on_gpu: Whether each rank needs a GPU.
        size: Ranks per bundle; the size of a tensor-parallel group by default.
        num_engines: Number of engines that share the GPUs, starting at rank 0.
        engine_ranks: Number of ranks that one engine shares.
    """
    size = size or layout.tensor
    engine_first_ranks = [index * engine_ranks for index in range(num_engines)]
    bundles = []
    for first in range(0, layout.world_size, size):
        num_hosted = sum(first <= rank < first + size for rank in engine_first_ranks)
        bundle = {"CPU": float(size + num_hosted)}
        if on_gpu:
            bundle["GPU"] = float(size)
        bundles.append(bundle)
    return bundles


class RankPlacement:
    """Reserved resources of all policy ranks and, if `shared`, of the engines on their GPUs.

    The constructor raises `ValueError` if no node has room for a whole bundle.
    """

    def __init__(self, config: TrainConfig, *, on_gpu: bool, shared: bool = False) -> None:
        layout, self._ranks_per_engine = config.parallel, config.engine.tensor_parallel_size
        self._ranks_per_bundle = size = min_ranks_per_node(config) if shared else layout.tensor
        bundles = placement_bundles(
            layout,
            on_gpu=on_gpu,
            size=size,
            num_engines=config.cluster.num_engines if shared else 0,
            engine_ranks=self._ranks_per_engine,
        )
        self._placement_group = placement_group(bundles, strategy="PACK")
        ready, _ = ray.wait([self._placement_group.ready()], timeout=_PLACEMENT_TIMEOUT_S)
        if not ready:
            self.release()
            raise ValueError(
                f"parallel.tensor={layout.tensor}: no room for {len(bundles)} groups of {size} "
                f"ranks, each in one node, within {_PLACEMENT_TIMEOUT_S:g} s; probable cause: a "
                "tensor-parallel size above the GPUs of a node, or other jobs on the cluster"
            )

    def for_rank(self, rank: int) -> Any:
        """Return the scheduling strategy of a rank."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._placement_group,
            placement_group_bundle_index=rank // self._ranks_per_bundle,
        )

    def for_engine(self, index: int) -> Any:
        """Return the scheduling strategy of an engine: the bundle of its first rank."""
        return self.for_rank(index * self._ranks_per_engine)

    def release(self) -> None:
        """Release the reserved resources; safe to call twice."""
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None

"""Where the policy ranks go: every tensor-parallel group whole inside one node.

A tensor-parallel group exchanges activations in every layer, so it must not cross nodes.
Each group is one bundle of a placement group, and Ray puts a bundle on a single node.

Engines on GPUs of their own need none of this: an engine is one Ray actor that starts its own
workers beside it. Engines that share the policy's GPUs (`cluster.colocated`) are in the bundles of
the ranks they share with, which then hold whole engines as well. In Ray's books the GPUs are the
policy's, one a rank; an engine has none there and is told by name which it may use, as Ray's
fractions of a GPU could put two ranks on one and can give nobody parts of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mega_agentrl.config.check_colocation import ranks_in_a_node

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import ParallelConfig
    from mega_agentrl.config.schema import TrainConfig

_DEADLINE_S = 120.0


def bundles(
    layout: ParallelConfig,
    *,
    on_gpu: bool,
    size: int | None = None,
    num_engines: int = 0,
    engine_ranks: int = 1,
) -> list[dict[str, float]]:
    """Resources of each bundle, in rank order (tensor rank runs fastest).

    size: ranks of a bundle, by default a tensor-parallel group. num_engines: with engine_ranks
    each, from the first rank on.
    """
    size = size or layout.tensor
    found = []
    for first in range(0, layout.num_ranks, size):
        hosted = sum(first <= index * engine_ranks < first + size for index in range(num_engines))
        bundle = {"CPU": float(size + hosted)}
        if on_gpu:
            bundle["GPU"] = float(size)
        found.append(bundle)
    return found


class PolicyPlacement:
    """The reserved places of all policy ranks, and of the engines that share their GPUs.

    shared: whether there are such engines.
    """

    def __init__(self, config: TrainConfig, *, on_gpu: bool, shared: bool = False) -> None:
        """Reserve them; raises `ValueError` where no node has room for a whole bundle."""
        layout, self._engine_ranks = config.parallel, config.engine.tensor
        self._size = size = ranks_in_a_node(config) if shared else layout.tensor
        wanted = bundles(
            layout,
            on_gpu=on_gpu,
            size=size,
            num_engines=config.cluster.num_engines if shared else 0,
            engine_ranks=self._engine_ranks,
        )
        self._group = placement_group(wanted, strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=_DEADLINE_S)
        if not ready:
            self.release()
            raise ValueError(
                f"parallel.tensor={layout.tensor}: no room for {len(wanted)} groups of {size} "
                f"ranks, each inside one node, within {_DEADLINE_S:g} s; probable cause: a "
                "tensor-parallel size above the GPUs of a node, or other jobs on the cluster"
            )

    def of(self, rank: int) -> Any:
        """The scheduling strategy of one rank."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank // self._size
        )

    def of_engine(self, index: int) -> Any:
        """The scheduling strategy of an engine, beside the ranks whose GPUs it shares."""
        return self.of(index * self._engine_ranks)

    def release(self) -> None:
        """Give the places back; safe to call twice."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

"""Where the policy ranks go: every tensor-parallel group whole inside one node.

A tensor-parallel group exchanges activations in every layer, so it must not cross nodes.
Each group is one bundle of a placement group, and Ray puts a bundle on a single node.
Engines need none of this: an engine is one Ray actor that starts its own workers beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import ParallelConfig

_DEADLINE_S = 120.0


def bundles(layout: ParallelConfig, *, on_gpu: bool) -> list[dict[str, float]]:
    """Resources of each tensor-parallel group, in rank order (tensor rank runs fastest)."""
    size = float(layout.tensor)
    bundle = {"CPU": size, "GPU": size} if on_gpu else {"CPU": size}
    return [dict(bundle) for _ in range(layout.num_ranks // layout.tensor)]


class PolicyPlacement:
    """The reserved places of all policy ranks."""

    def __init__(self, layout: ParallelConfig, *, on_gpu: bool) -> None:
        """Reserve them; raises `ValueError` where no node has room for a whole group."""
        self._tensor = layout.tensor
        self._group = placement_group(bundles(layout, on_gpu=on_gpu), strategy="PACK")
        ready, _ = ray.wait([self._group.ready()], timeout=_DEADLINE_S)
        if not ready:
            self.release()
            raise ValueError(
                f"parallel.tensor={layout.tensor}: no room for {layout.num_ranks // layout.tensor} "
                f"groups of {layout.tensor} ranks, each inside one node, within {_DEADLINE_S:g} s; "
                "probable cause: a tensor-parallel size above the GPUs of a node, or other jobs "
                "on the cluster"
            )

    def of(self, rank: int) -> Any:
        """The scheduling strategy of one rank."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank // self._tensor
        )

    def release(self) -> None:
        """Give the places back; safe to call twice."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

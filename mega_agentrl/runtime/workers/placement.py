"""Placement of the policy ranks and the engines: one placement group for both.

A tensor-parallel group communicates in every layer, so it must not span nodes. Each group is one
bundle of the placement group, and Ray puts a bundle on a single node. Each engine, which starts its
workers on its own node, is another bundle.

Ranks and engines are in one placement group because Ray then places all bundles at once, the
largest first, and fills node after node. A job that needs every GPU of its nodes thus finds room.
Outside of a placement group, Ray would choose an engine's node by CPUs and memory, at random among
several, and leave nodes in which no tensor-parallel group has room.

Engines that share the policy's GPUs (`cluster.colocated`) go into the bundles of the ranks whose
GPUs they use, and a bundle then holds whole engines. In Ray's accounting each rank owns one GPU and
an engine owns none; the engine gets the names of its GPUs instead, because Ray's fractional GPUs
could put two ranks on one GPU and cannot give an actor fractions of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mega_agentrl.config.checks.parallel import min_ranks_per_node
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

Bundles = list[dict[str, float]]
"""Resources of bundles by name."""

_PLACEMENT_TIMEOUT_S = 120.0


def rank_bundles(config: TrainConfig, size: int, *, on_gpu: bool, num_engines: int = 0) -> Bundles:
    """Return the resources of the bundles of all ranks, in rank order (tensor rank varies fastest).

    Args:
        config: Settings of the run.
        size: Number of ranks per bundle.
        on_gpu: Whether each rank needs a GPU.
        num_engines: Number of engines that share the GPUs, starting at rank 0.
    """
    engine_ranks = config.engine.tensor_parallel_size
    first_ranks = [index * engine_ranks for index in range(num_engines)]
    return [
        _bundle(size + sum(first <= rank < first + size for rank in first_ranks), on_gpu * size)
        for first in range(0, config.parallel.world_size, size)
    ]


def engine_bundles(config: TrainConfig, *, on_gpu: bool) -> Bundles:
    """Return the resources of the bundles of all engines that have GPUs of their own."""
    num_gpus = on_gpu * config.engine.tensor_parallel_size
    return [_bundle(1, num_gpus)] * config.cluster.num_engines


def _bundle(num_cpus: int, num_gpus: int) -> dict[str, float]:
    return {"CPU": float(num_cpus)} | ({"GPU": float(num_gpus)} if num_gpus else {})


class Placement:
    """Reserved resources of all ranks of a model and, for the policy, of all engines.

    If a node is lost, Ray moves its bundles to another one. The constructor raises `ConfigError` if
    no node has room for a whole bundle.
    """

    def __init__(self, config: TrainConfig, *, on_gpu: bool, with_engines: bool = False) -> None:
        """Reserve the resources and wait for them.

        Args:
            config: Settings of the run.
            on_gpu: Whether ranks and engines need GPUs.
            with_engines: Whether to reserve room for the engines, too.
        """
        self._config = config
        self._is_shared = with_engines and config.cluster.colocated
        self._ranks_per_bundle = config.parallel.tensor
        num_sharing = 0
        if self._is_shared:
            self._ranks_per_bundle = min_ranks_per_node(config)
            num_sharing = config.cluster.num_engines
        bundles = rank_bundles(
            config, self._ranks_per_bundle, on_gpu=on_gpu, num_engines=num_sharing
        )
        self._num_rank_bundles = len(bundles)
        if with_engines and not self._is_shared:
            bundles += engine_bundles(config, on_gpu=on_gpu)
        self._placement_group = placement_group(bundles, strategy="PACK")
        ready, _ = ray.wait([self._placement_group.ready()], timeout=_PLACEMENT_TIMEOUT_S)
        if not ready:
            self.release()
            num_engines = len(bundles) - self._num_rank_bundles
            engines = f" and {num_engines} engines ({bundles[-1]})" if num_engines else ""
            raise ConfigError(
                "parallel.tensor",
                config.parallel.tensor,
                f"room for {self._num_rank_bundles} groups of {self._ranks_per_bundle} ranks"
                f"{engines}, each in one node, within {_PLACEMENT_TIMEOUT_S:g} s",
                "a tensor-parallel size above the GPUs of a node, or other jobs on the cluster",
            )

    def for_rank(self, rank: int) -> Any:
        """Return the scheduling strategy of a rank."""
        return self._strategy(rank // self._ranks_per_bundle)

    def for_engine(self, index: int) -> Any:
        """Return an engine's scheduling strategy: its bundle, or the bundle of its first rank."""
        if self._is_shared:
            return self.for_rank(index * self._config.engine.tensor_parallel_size)
        return self._strategy(self._num_rank_bundles + index)

    def release(self) -> None:
        """Release the reserved resources, and kill what uses them; safe to call twice."""
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None

    def _strategy(self, bundle: int) -> Any:
        return PlacementGroupSchedulingStrategy(
            placement_group=self._placement_group, placement_group_bundle_index=bundle
        )

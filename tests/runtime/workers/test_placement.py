"""One bundle per tensor-parallel group, whole inside a node."""

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.workers import placement as module
from mega_agentrl.runtime.workers.placement import RankPlacement, placement_bundles


def test_bundles_by_hand():
    layout = ParallelConfig(tensor=4, pipeline=2, data=3)
    assert placement_bundles(layout, on_gpu=True) == [{"CPU": 4, "GPU": 4}] * 6
    assert placement_bundles(layout, on_gpu=False) == [{"CPU": 4}] * 6


def bundles_of(config, *, engines=0, ranks=0, shared=False):
    """Bundle of each rank or engine in a placement on this cluster."""
    placement = RankPlacement(config, on_gpu=False, shared=shared)
    strategies = [placement.for_rank(rank) for rank in range(ranks)]
    strategies += [placement.for_engine(index) for index in range(engines)]
    placement.release()
    placement.release()
    return [strategy.placement_group_bundle_index for strategy in strategies]


def test_ranks_of_a_group_share_a_bundle(ray_local):
    config = TrainConfig(parallel=ParallelConfig(tensor=2, pipeline=2))
    assert bundles_of(config, ranks=4) == [0, 0, 1, 1]


def test_release_frees_the_resources(ray_local):
    for _ in range(2):
        placement = RankPlacement(TrainConfig(parallel=ParallelConfig(tensor=4)), on_gpu=False)

        @ray.remote(num_cpus=1)
        def inside():
            return True

        task = inside.options(scheduling_strategy=placement.for_rank(3)).remote()
        assert ray.get(task, timeout=300)
        placement.release()


def test_group_that_fits_no_node_is_an_error(ray_local, monkeypatch):
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(ValueError, match=r"parallel\.tensor=64"):
        RankPlacement(TrainConfig(parallel=ParallelConfig(tensor=64)), on_gpu=False)


def test_colocated_engines_are_in_the_bundles_of_their_ranks(ray_local):
    layout = ParallelConfig(tensor=2, data=2)
    whole = placement_bundles(layout, on_gpu=True, size=4, num_engines=1)
    assert whole == [{"CPU": 5, "GPU": 4}]
    layout = ParallelConfig(tensor=2, data=3)
    half = placement_bundles(layout, on_gpu=False, size=2, num_engines=2, engine_ranks=2)
    assert half == [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}], "no engine shares with the last ranks"
    cluster = ClusterConfig(num_engines=2, colocated=True)
    for layout, bundles in ((ParallelConfig(tensor=2), [0, 0]), (ParallelConfig(data=2), [0, 1])):
        config = TrainConfig(parallel=layout, cluster=cluster)
        assert bundles_of(config, engines=2, shared=True) == bundles

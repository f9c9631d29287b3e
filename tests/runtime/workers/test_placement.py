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


def test_ranks_of_a_group_share_a_bundle(ray_local):
    placement = RankPlacement(
        TrainConfig(parallel=ParallelConfig(tensor=2, pipeline=2)), on_gpu=False
    )
    indices = [placement.for_rank(rank).placement_group_bundle_index for rank in range(4)]
    placement.release()
    placement.release()
    assert indices == [0, 0, 1, 1]


def test_release_frees_the_resources(ray_local):
    for _ in range(2):
        placement = RankPlacement(TrainConfig(parallel=ParallelConfig(tensor=4)), on_gpu=False)

        @ray.remote(num_cpus=1)
        def inside():
            return True

        assert ray.get(
            inside.options(scheduling_strategy=placement.for_rank(3)).remote(), timeout=300
        )
        placement.release()


def test_group_that_fits_no_node_is_an_error(ray_local, monkeypatch):
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(ValueError, match=r"parallel.tensor=64: no room for 1 groups of 64"):
        RankPlacement(TrainConfig(parallel=ParallelConfig(tensor=64)), on_gpu=False)


def test_colocated_engines_are_in_the_bundles_of_their_ranks(ray_local):
    assert placement_bundles(
        ParallelConfig(tensor=2, data=2), on_gpu=True, size=4, num_engines=1
    ) == [{"CPU": 5, "GPU": 4}]
    layout = ParallelConfig(tensor=2, data=3)
    half = placement_bundles(layout, on_gpu=False, size=2, num_engines=2, engine_ranks=2)
    assert half == [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}], "no engine shares with the last ranks"
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2),
        cluster=ClusterConfig(num_engines=2, colocated=True),
    )
    placement = RankPlacement(config, on_gpu=False, shared=True)
    indices = [placement.for_engine(index).placement_group_bundle_index for index in range(2)]
    placement.release()
    assert indices == [0, 0]
    config.parallel = ParallelConfig(data=2)
    placement = RankPlacement(config, on_gpu=False, shared=True)
    indices = [placement.for_engine(index).placement_group_bundle_index for index in range(2)]
    placement.release()
    assert indices == [0, 1]

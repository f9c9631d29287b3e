"""Bundles: one per tensor-parallel group and per engine, each whole inside a node."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from mega_agentrl.runtime.workers import placement as module
from mega_agentrl.runtime.workers.placement import Placement, engine_bundles, rank_bundles
from tests.config.refusals import refused_setting


def test_ranks_and_engines_get_bundles_of_cpus_and_gpus():
    config = TrainConfig(
        parallel=ParallelConfig(tensor=4, pipeline=2, data=3),
        engine=EngineConfig(tensor_parallel_size=2),
        cluster=ClusterConfig(num_engines=3),
    )
    assert rank_bundles(config, 4, on_gpu=True) == [{"CPU": 4, "GPU": 4}] * 6
    assert rank_bundles(config, 4, on_gpu=False) == [{"CPU": 4}] * 6
    assert engine_bundles(config, on_gpu=True) == [{"CPU": 1, "GPU": 2}] * 3
    assert engine_bundles(config, on_gpu=False) == [{"CPU": 1}] * 3


def bundles_of(config, *, engines=0, ranks=0, with_engines=False):
    """Bundle of each rank or engine in a placement on this cluster."""
    placement = Placement(config, on_gpu=False, with_engines=with_engines)
    strategies = [placement.for_rank(rank) for rank in range(ranks)]
    strategies += [placement.for_engine(index) for index in range(engines)]
    placement.release()
    placement.release()
    return [strategy.placement_group_bundle_index for strategy in strategies]


def test_ranks_of_a_group_share_a_bundle_and_engines_have_their_own(ray_local):
    config = TrainConfig(parallel=ParallelConfig(tensor=2, pipeline=2))
    assert bundles_of(config, ranks=4) == [0, 0, 1, 1]
    config = TrainConfig(parallel=ParallelConfig(tensor=2), cluster=ClusterConfig(num_engines=2))
    assert bundles_of(config, ranks=2, engines=2, with_engines=True) == [0, 0, 1, 2]


def test_release_frees_the_resources(ray_local):
    for _ in range(2):
        placement = Placement(TrainConfig(parallel=ParallelConfig(tensor=4)), on_gpu=False)

        @ray.remote(num_cpus=1)
        def inside():
            return True

        task = inside.options(scheduling_strategy=placement.for_rank(3)).remote()
        assert ray.get(task, timeout=300)
        placement.release()


def test_group_that_fits_no_node_is_an_error(ray_local, monkeypatch):
    monkeypatch.setattr(module, "_PLACEMENT_TIMEOUT_S", 0.2)
    config = TrainConfig(parallel=ParallelConfig(tensor=64))
    assert refused_setting(Placement, config, on_gpu=False) == ("parallel.tensor", 64)


def test_colocated_engines_are_in_the_bundles_of_their_ranks(ray_local):
    config = TrainConfig(parallel=ParallelConfig(tensor=2, data=2))
    whole = rank_bundles(config, 4, on_gpu=True, num_engines=1)
    assert whole == [{"CPU": 5, "GPU": 4}]
    config = TrainConfig(
        parallel=ParallelConfig(tensor=2, data=3), engine=EngineConfig(tensor_parallel_size=2)
    )
    half = rank_bundles(config, 2, on_gpu=False, num_engines=2)
    assert half == [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}], "no engine shares with the last ranks"
    cluster = ClusterConfig(num_engines=2, colocated=True)
    for layout, bundles in ((ParallelConfig(tensor=2), [0, 0]), (ParallelConfig(data=2), [0, 1])):
        config = TrainConfig(parallel=layout, cluster=cluster)
        assert bundles_of(config, engines=2, with_engines=True) == bundles


FULL_CLUSTERS = {
    "wide_groups": (ParallelConfig(tensor=8, data=8), 16, 2),
    "small_groups": (ParallelConfig(tensor=2, pipeline=4, data=4), 16, 4),
    "many_engines": (ParallelConfig(tensor=8, pipeline=4, data=2), 32, 1),
}
"""Layout of the policy, engines and GPUs of an engine: 96 GPUs each."""


STORE_BYTES = 80 * 1024**2


def gpus_used_by_node(configs, *, num_nodes, gpus_per_node):
    """Place each job alone on a cluster; return the GPUs that it takes, sorted, by node.

    The GPUs exist in Ray's accounting only.
    """
    cluster = Cluster()
    for _ in range(num_nodes):
        cluster.add_node(
            num_cpus=gpus_per_node, num_gpus=gpus_per_node, object_store_memory=STORE_BYTES
        )
    ray.init(address=cluster.address, log_to_driver=False)
    used = []
    for config in configs:
        placement = Placement(config, on_gpu=True, with_engines=True)
        table = placement_group_table(placement._placement_group)
        placement.release()
        count = Counter()
        for index, node in table["bundles_to_node_id"].items():
            count[node] += int(table["bundles"][index]["GPU"])
        used.append(sorted(count.values()))
    ray.shutdown()
    cluster.shutdown()
    return used


@pytest.mark.slow(90)
def test_jobs_that_need_every_gpu_of_a_cluster_find_room():
    """On 12 nodes of 8 GPUs: engines placed one by one would leave no node to a whole group."""
    configs = [
        TrainConfig(
            parallel=layout,
            engine=EngineConfig(tensor_parallel_size=size),
            cluster=ClusterConfig(num_engines=num_engines),
        )
        for layout, num_engines, size in FULL_CLUSTERS.values()
    ]
    # A process of its own, because this one may be connected to another cluster.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        used = process.submit(gpus_used_by_node, configs, num_nodes=12, gpus_per_node=8).result()
    assert dict(zip(FULL_CLUSTERS, used, strict=True)) == dict.fromkeys(FULL_CLUSTERS, [8] * 12)

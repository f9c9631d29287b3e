"""Checks that a parallel layout fits the cores and GPUs."""

import os

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from mega_agentrl.runtime import cluster
from mega_agentrl.runtime.cluster import check_cluster_size, check_local_size, check_torch_build

TWO_RANKS = ParallelConfig(tensor=2)
CRITIC = AlgoConfig(advantage="gae")
JUDGE = RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("folder"))


def make_config(parallel=TWO_RANKS, **sections):
    return TrainConfig(parallel=parallel, **sections)


def test_policy_and_engine_share_cpu_cores():
    check_cluster_size(make_config(), num_cores=2, num_gpus=0)


def test_more_ranks_than_cores_warn_or_fail(caplog):
    wide = make_config(ParallelConfig(tensor=2, pipeline=2))
    check_cluster_size(wide, num_cores=2, num_gpus=0)
    assert "4 policy ranks" in caplog.text and "2 cores" in caplog.text
    check_cluster_size(make_config(ParallelConfig(data=8)), num_cores=2, num_gpus=0)
    with pytest.raises(ValueError, match=r"parallel.data=9.*more ranks than 4 to each of the 2"):
        check_cluster_size(make_config(ParallelConfig(data=9)), num_cores=2, num_gpus=0)
    wide.cluster.ray_address = "auto"
    with pytest.raises(ValueError, match=r"parallel.pipeline=2.*4 policy ranks.*5 actors.*has 4"):
        check_cluster_size(wide, num_cores=4, num_gpus=0)
    check_cluster_size(wide, num_cores=5, num_gpus=0)


@pytest.mark.parametrize(
    ("sections", "num_gpus"),
    [
        ({"engine": EngineConfig(tensor_parallel_size=2)}, 4),
        ({"engine": EngineConfig(tensor_parallel_size=2), "cluster": {"colocated": True}}, 2),
        ({"algo": CRITIC}, 5),
        ({"algo": CRITIC, "total_steps": 0}, 3),
        ({"reward": JUDGE}, 5),
    ],
    ids=["engine", "colocated", "critic", "evaluation", "reward_model"],
)
def test_every_rank_needs_a_gpu_except_engines_that_share_the_policys(sections, num_gpus):
    made = make_config(**sections | {"cluster": ClusterConfig(**sections.get("cluster", {}))})
    check_cluster_size(made, num_cores=2, num_gpus=num_gpus)
    named = f"{num_gpus} GPUs needed, the cluster has {num_gpus - 1}"
    with pytest.raises(ValueError, match=named):
        check_cluster_size(made, num_cores=64, num_gpus=num_gpus - 1)


def test_gpus_hidden_from_torch_do_not_count(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", (os.devnull,))
    with pytest.raises(ValueError, match="3 GPUs needed, the cluster has 2"):
        check_local_size(make_config())
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", ("/dev/no_driver",))
    check_local_size(make_config())


def test_gpu_cluster_needs_a_cuda_build_of_torch():
    check_torch_build(8, "13.0")
    check_torch_build(0, None)
    with pytest.raises(ValueError, match="8 GPUs"):
        check_torch_build(8, None)


def test_workers_have_the_priority_of_their_driver(ray_local):
    @ray.remote
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert ray.get(niceness.remote(), timeout=300) == os.getpriority(os.PRIO_PROCESS, 0)

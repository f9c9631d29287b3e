"""Checks that a parallel layout fits the cores and GPUs."""

import os

import pytest

from mega_agentrl.config.enums import AdvantageEstimator
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.runtime import cluster
from mega_agentrl.runtime.cluster import check_cluster_size, check_local_size, check_torch_build


def config(**sections):
    return TrainConfig(**sections)


def test_policy_and_engine_share_cpu_cores():
    check_cluster_size(config(parallel=ParallelConfig(tensor=2)), num_cores=2, num_gpus=0)


def test_more_ranks_than_cores_warn_or_fail(caplog):
    wide = config(parallel=ParallelConfig(tensor=2, pipeline=2))
    check_cluster_size(wide, num_cores=2, num_gpus=0)
    assert "parallel.pipeline=2" in caplog.text
    assert "4 policy ranks" in caplog.text
    assert "share 2 cores" in caplog.text
    check_cluster_size(config(parallel=ParallelConfig(data=8)), num_cores=2, num_gpus=0)
    with pytest.raises(ValueError, match=r"parallel.data=9.*more ranks than 4 to each of the 2"):
        check_cluster_size(config(parallel=ParallelConfig(data=9)), num_cores=2, num_gpus=0)
    wide.cluster.ray_address = "auto"
    with pytest.raises(ValueError, match=r"parallel.pipeline=2.*4 policy ranks.*5 actors.*has 4"):
        check_cluster_size(wide, num_cores=4, num_gpus=0)
    check_cluster_size(wide, num_cores=5, num_gpus=0)


def test_critic_needs_its_own_gpus():
    made = config(
        parallel=ParallelConfig(tensor=2), algo=AlgoConfig(advantage=AdvantageEstimator.gae)
    )
    check_cluster_size(made, num_cores=2, num_gpus=5)
    with pytest.raises(ValueError, match=r"2 ranks of the critic, .*: 5 GPUs needed, the cluster"):
        check_cluster_size(made, num_cores=2, num_gpus=4)
    made.total_steps = 0
    check_cluster_size(made, num_cores=2, num_gpus=3)


def test_every_rank_needs_its_own_gpu():
    both = config(parallel=ParallelConfig(tensor=2), engine=EngineConfig(tensor_parallel_size=2))
    check_cluster_size(both, num_cores=2, num_gpus=4)
    with pytest.raises(ValueError, match="4 GPUs needed, the cluster has 3"):
        check_cluster_size(both, num_cores=64, num_gpus=3)


def test_local_reward_model_needs_its_own_gpus():
    judged = config(
        parallel=ParallelConfig(tensor=2),
        reward=RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("folder")),
    )
    check_cluster_size(judged, num_cores=2, num_gpus=5)
    with pytest.raises(ValueError, match=r"and 2 ranks of the reward model.*5 GPUs needed"):
        check_cluster_size(judged, num_cores=2, num_gpus=4)


def test_gpus_hidden_from_torch_do_not_count(monkeypatch):
    made = config(parallel=ParallelConfig(tensor=2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", (os.devnull,))
    with pytest.raises(ValueError, match=r"3 GPUs needed, the cluster has 2.*parallel=single"):
        check_local_size(made)
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", ("/dev/no_driver",))
    check_local_size(made)


def test_gpu_cluster_needs_a_cuda_build_of_torch():
    check_torch_build(8, "13.0")
    check_torch_build(0, None)
    with pytest.raises(ValueError, match=r"8 GPUs.*build for CPUs.*DEVICE=gpu"):
        check_torch_build(8, None)


def test_colocated_engines_need_no_gpus_of_their_own():
    both = config(parallel=ParallelConfig(tensor=2), engine=EngineConfig(tensor_parallel_size=2))
    both.cluster.colocated = True
    check_cluster_size(both, num_cores=2, num_gpus=2)
    with pytest.raises(ValueError, match="2 GPUs needed, the cluster has 1"):
        check_cluster_size(both, num_cores=2, num_gpus=1)

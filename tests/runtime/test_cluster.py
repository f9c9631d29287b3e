"""Does the layout fit: cores, GPUs, ranks that share cores."""

import os

import pytest

from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.choices import Advantage
from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig
from mega_agentrl.config.schema import (
    EngineConfig,
    ParallelConfig,
    TrainConfig,
)
from mega_agentrl.runtime import cluster
from mega_agentrl.runtime.cluster import check_build, check_local_size, check_size


def config(**sections):
    return TrainConfig(**sections)


def test_policy_and_engine_take_turns_on_a_cpu():
    check_size(config(parallel=ParallelConfig(tensor=2)), num_cores=2, num_gpus=0)


def test_more_ranks_than_cores_are_slow_and_said_so(caplog):
    wide = config(parallel=ParallelConfig(tensor=2, pipeline=2))
    check_size(wide, num_cores=2, num_gpus=0)
    assert "parallel.pipeline=2" in caplog.text
    assert "4 policy ranks" in caplog.text
    assert "share 2 cores" in caplog.text
    check_size(config(parallel=ParallelConfig(data=8)), num_cores=2, num_gpus=0)
    with pytest.raises(ValueError, match=r"parallel.data=9.*more ranks than 4 to each of the 2"):
        check_size(config(parallel=ParallelConfig(data=9)), num_cores=2, num_gpus=0)
    wide.cluster.address = "auto"
    with pytest.raises(ValueError, match=r"parallel.pipeline=2.*4 policy ranks.*5 actors.*has 4"):
        check_size(wide, num_cores=4, num_gpus=0)
    check_size(wide, num_cores=5, num_gpus=0)


def test_a_critic_has_ranks_of_its_own():
    made = config(parallel=ParallelConfig(tensor=2), algo=AlgoConfig(advantage=Advantage.gae))
    check_size(made, num_cores=2, num_gpus=5)
    with pytest.raises(ValueError, match=r"2 ranks of the critic, .*: 5 GPUs needed, the cluster"):
        check_size(made, num_cores=2, num_gpus=4)
    made.total_steps = 0
    check_size(made, num_cores=2, num_gpus=3)


def test_every_rank_needs_a_gpu_of_its_own():
    both = config(parallel=ParallelConfig(tensor=2), engine=EngineConfig(tensor=2))
    check_size(both, num_cores=2, num_gpus=4)
    with pytest.raises(ValueError, match="4 GPUs needed, the cluster has 3"):
        check_size(both, num_cores=64, num_gpus=3)


def test_a_reward_model_in_a_folder_has_ranks_of_its_own():
    judged = config(
        parallel=ParallelConfig(tensor=2),
        reward=RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("folder")),
    )
    check_size(judged, num_cores=2, num_gpus=5)
    with pytest.raises(ValueError, match=r"and 2 ranks of the reward model.*5 GPUs needed"):
        check_size(judged, num_cores=2, num_gpus=4)


def test_what_is_hidden_from_torch_is_not_there(monkeypatch):
    made = config(parallel=ParallelConfig(tensor=2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(cluster, "DRIVER_FILES", (os.devnull,))
    with pytest.raises(ValueError, match=r"3 GPUs needed, the cluster has 2.*parallel=single"):
        check_local_size(made)
    monkeypatch.setattr(cluster, "DRIVER_FILES", ("/dev/no_driver",))
    check_local_size(made)


def test_a_cluster_with_gpus_needs_a_torch_with_cuda():
    check_build(8, "13.0")
    check_build(0, None)
    with pytest.raises(ValueError, match=r"8 GPUs.*build for CPUs.*DEVICE=gpu"):
        check_build(8, None)


def test_engines_on_the_policy_s_gpus_need_none():
    both = config(parallel=ParallelConfig(tensor=2), engine=EngineConfig(tensor=2))
    both.cluster.colocated = True
    check_size(both, num_cores=2, num_gpus=2)
    with pytest.raises(ValueError, match="2 GPUs needed, the cluster has 1"):
        check_size(both, num_cores=2, num_gpus=1)

"""Does the layout fit: cores, GPUs, oversubscription."""

import pytest

from mega_agentrl.config.schema import (
    ClusterConfig,
    EngineConfig,
    ParallelConfig,
    TrainConfig,
)
from mega_agentrl.runtime.cluster import check_size


def config(**sections):
    return TrainConfig(**sections)


def test_policy_and_engine_take_turns_on_a_cpu():
    check_size(config(parallel=ParallelConfig(tensor=2)), num_cores=2, num_gpus=0)


def test_more_ranks_than_cores_names_the_keys():
    wide = config(parallel=ParallelConfig(tensor=2, pipeline=2))
    with pytest.raises(ValueError, match=r"parallel.pipeline=2.*4 policy ranks.*2 cores.*oversub"):
        check_size(wide, num_cores=2, num_gpus=0)


def test_oversubscription_is_allowed_when_asked_for():
    wide = config(
        parallel=ParallelConfig(tensor=2, pipeline=2), cluster=ClusterConfig(oversubscribe=True)
    )
    check_size(wide, num_cores=2, num_gpus=0)


def test_every_rank_needs_a_gpu_of_its_own():
    both = config(parallel=ParallelConfig(tensor=2), engine=EngineConfig(tensor=2))
    check_size(both, num_cores=2, num_gpus=4)
    with pytest.raises(ValueError, match="4 GPUs needed, the cluster has 3"):
        check_size(both, num_cores=64, num_gpus=3)

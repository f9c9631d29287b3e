"""Engines on the policy's GPUs: which numbers go together."""

import pytest

from mega_agentrl.config.check_colocation import check_colocation, ranks_in_a_node
from mega_agentrl.config.schema import ClusterConfig, EngineConfig, ParallelConfig, TrainConfig


def configured(num_engines, engine, colocated=True, **cut):
    return TrainConfig(
        parallel=ParallelConfig(**cut),
        engine=EngineConfig(tensor=engine),
        cluster=ClusterConfig(num_engines=num_engines, colocated=colocated),
    )


@pytest.mark.parametrize(
    ("num_engines", "tensor", "cut"),
    [
        (4, 2, {"tensor": 4, "data": 2}),
        (2, 4, {"tensor": 2, "data": 4}),
        (1, 2, {"data": 4}),  # two GPUs without an engine
        (3, 2, {"tensor": 3, "pipeline": 2}),
    ],
)
def test_engines_take_the_ranks_or_a_part_of_them(num_engines, tensor, cut):
    check_colocation(configured(num_engines, tensor, **cut))


@pytest.mark.parametrize(("num_engines", "tensor"), [(3, 1), (1, 3), (4, 2), (2, 4)])
def test_engines_that_do_not_divide_the_ranks_are_refused(num_engines, tensor):
    made = configured(num_engines, tensor, data=4)
    with pytest.raises(ValueError, match=rf"cluster.num_engines={num_engines}.*divisor .* 4"):
        check_colocation(made)
    made.cluster.colocated = False
    check_colocation(made)


def test_rollouts_beside_the_learning_step_are_refused():
    made = configured(1, 1)
    made.rollout.staleness = 1
    with pytest.raises(ValueError, match=r"rollout.staleness=1: expected 0 with cluster\.coloc"):
        check_colocation(made)


def test_whole_tensor_groups_and_whole_engines_are_on_one_machine():
    assert ranks_in_a_node(configured(1, 8, tensor=2, data=4)) == 8
    assert ranks_in_a_node(configured(4, 2, tensor=8)) == 8
    assert ranks_in_a_node(configured(3, 2, tensor=3, data=2)) == 6
    assert ranks_in_a_node(configured(1, 8, colocated=False, tensor=2, data=4)) == 2

"""Coordinates of ranks and groups of them, by hand."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mega_agentrl.actor.parallel.process_groups import (
    RankCoordinates,
    destroy_process_groups,
    format_ranks,
    init_process_groups,
    partition_ranks,
)
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.errors import InputError
from tests.config.refusals import refused_setting
from tests.parallel.collective_guard import run_guarded
from tests.tiny_models import make_tiny_model


def test_tensor_runs_fastest_then_context_then_data_then_pipeline():
    layout = ParallelConfig(tensor=2, context=2, data=3, pipeline=2)
    # 19 = 1 + 2 * (1 + 2 * (1 + 3 * 1))
    coordinates = RankCoordinates.from_rank(19, layout)
    mp_rank = coordinates.model_parallel_rank
    assert (mp_rank.tensor_rank, coordinates.context_rank) == (1, 1)
    assert (coordinates.data_rank, mp_rank.pipeline_rank) == (1, 1)
    assert coordinates.is_last_stage
    everyone = {RankCoordinates.from_rank(rank, layout) for rank in range(layout.world_size)}
    assert len(everyone) == layout.world_size == 24


def test_experts_divide_the_ranks_of_a_stage_in_another_order():
    layout = ParallelConfig(tensor=2, data=4, pipeline=2, expert=2, expert_tensor=2)
    # Inside a stage: expert tensor fastest, then expert, then expert data.
    places = [RankCoordinates.from_rank(rank, layout) for rank in range(8)]
    assert [at.model_parallel_rank.expert_tensor_rank for at in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [at.model_parallel_rank.expert_rank for at in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [at.expert_data_rank for at in places] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_groups_are_rows_of_the_grid():
    layout = ParallelConfig(tensor=2, data=2, pipeline=2)
    data = partition_ranks(layout, ("tensor", "pipeline"))
    assert data == [[0, 2], [1, 3], [4, 6], [5, 7]]
    model = partition_ranks(layout, ("data",))
    assert model == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_many_ranks_are_named_by_the_first_and_the_last():
    assert format_ranks(range(0, 64, 8)) == "ranks 0, 8, 16, 24, 32, 40, 48, 56"
    assert format_ranks(range(0, 72, 8)) == "ranks 0, 8, ... 64 (9 in all)"


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(InputError) as caught:
        RankCoordinates.from_rank(4, ParallelConfig(tensor=2, data=2))
    assert (caught.value.name, caught.value.got) == ("rank", 4)


def test_experts_that_do_not_divide_the_stage_are_an_error():
    layout = ParallelConfig(tensor=2, pipeline=2, expert=4)
    assert refused_setting(RankCoordinates.from_rank, 0, layout) == ("parallel.expert", 4)


def test_a_world_of_another_size_is_an_error_before_anyone_waits():
    address = {"master_address": "127.0.0.1", "master_port": 1}
    with pytest.raises(InputError) as caught:
        init_process_groups(ParallelConfig(), rank=0, world_size=2, **address, timeout_s=1.0)
    assert (caught.value.name, caught.value.got) == ("world_size", 2)


def test_one_rank_has_every_group_and_can_leave_twice(one_rank):
    collection = one_rank.pg_collection
    for name in ("tp", "pp", "dp", "cp", "mp", "embd", "dp_cp", "ep", "expt_tp", "tp_ep_pp"):
        assert getattr(collection, name).size() == 1
    timeouts = {
        group._get_backend(torch.device("cpu")).options._timeout
        for group in dist.distributed_c10d._world.pg_map
    }
    assert timeouts == {timedelta(seconds=300)}, "a backend has its own default"
    assert one_rank.last_stage_rank == 0
    assert one_rank.describe_peers("tensor", "data", "all") == ""
    destroy_process_groups()
    destroy_process_groups()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, id="experts"),
        pytest.param("qwen3", {"pipeline": 2}, id="pipeline", marks=pytest.mark.extended),
        pytest.param("qwen3", {"tensor": 2}, id="tensor", marks=pytest.mark.extended),
        pytest.param("qwen3", {"context": 2}, id="context", marks=pytest.mark.extended),
        pytest.param("qwen3", {}, id="one-rank", marks=pytest.mark.extended),
        pytest.param(
            "qwen3_moe",
            {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2, "sequence_parallel": True},
            id="expert-tensor",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_no_communicator_is_created_after_the_groups(
    model, layout, batch, train_config, rank_pool, tmp_path
):
    """Neither by training nor by a checkpoint; nor does a rank reduce alone."""
    config = train_config(make_tiny_model(model, tmp_path / "model", tied=True), **layout)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    counts = rank_pool.run(run_guarded, config.parallel.world_size, config, batch, tmp_path)
    assert min(counts) > 0


def count_new_groups(rank_info, layout):
    """Return the groups of more than one rank that a rank creates, and the number of all."""
    created, new_group = [], dist.new_group

    def watch(ranks, **options):
        created.append(ranks)
        return new_group(ranks, **options)

    dist.new_group = watch
    try:
        init_process_groups(layout, **rank_info)
    finally:
        dist.new_group = new_group
    return [ranks for ranks in created if len(ranks) > 1], len(created)


def test_a_rank_creates_its_own_groups_only(rank_pool):
    """With 2 x 2 ranks a rank has its row, its column and the products; all is the default."""
    layout = ParallelConfig(data=2, pipeline=2)
    groups, count = zip(*rank_pool.run(count_new_groups, 4, layout), strict=True)
    for rank, of_rank in enumerate(groups):
        assert of_rank and all(rank in ranks and len(ranks) < 4 for ranks in of_rank)
    # dp_cp, expt_dp, dp and tp_dp_cp; pp, mp and tp_ep_pp; embd; and the one of a single rank.
    assert count == (9, 9, 9, 9)

from __future__ import annotations

import pytest
import torch.distributed as dist

from mega_agentrl.actor.groups import Position, _ranks_where, join, leave
from mega_agentrl.config.schema import ParallelConfig


def test_tensor_runs_fastest_then_data_then_pipeline():
    layout = ParallelConfig(tensor=2, data=3, pipeline=2)
    # 9 = 1 + 2 * (1 + 3 * 1)
    position = Position.of(9, layout)
    assert (position.tensor_rank, position.data_rank, position.pipeline_rank) == (1, 1, 1)
    assert position.last_stage
    assert not position.first_stage
    everyone = {
        (p.tensor_rank, p.data_rank, p.pipeline_rank)
        for p in (Position.of(rank, layout) for rank in range(12))
    }
    assert len(everyone) == 12


def test_groups_are_rows_of_the_grid():
    layout = ParallelConfig(tensor=2, data=2, pipeline=2)
    assert _ranks_where(layout, data=1, pipeline=1) == [6, 7]
    assert _ranks_where(layout, tensor=1, pipeline=0) == [1, 3]
    assert _ranks_where(layout, tensor=0, data=1) == [2, 6]
    assert _ranks_where(layout, data=0) == [0, 1, 4, 5]


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(ValueError, match=r"rank=4: expected 0\.\.3 from parallel.tensor=2"):
        Position.of(4, ParallelConfig(tensor=2, data=2))


def test_a_world_of_another_size_is_an_error_before_anyone_waits():
    with pytest.raises(ValueError, match="world_size=2: expected 1"):
        join(
            ParallelConfig(),
            rank=0,
            world_size=2,
            master_address="127.0.0.1",
            master_port=1,
            timeout_s=1.0,
        )


def test_one_rank_has_every_group_and_can_leave_twice(one_rank):
    collection = one_rank.collection
    for name in ("tp", "pp", "dp", "mp", "embd", "dp_cp", "tp_ep_pp"):
        assert getattr(collection, name).size() == 1
    assert one_rank.last_stage_rank == 0
    leave()
    leave()
    assert not dist.is_initialized()

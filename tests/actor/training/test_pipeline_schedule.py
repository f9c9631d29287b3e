"""Passes of micro-batches on one stage, and what stages track while they wait for each other."""

from __future__ import annotations

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mega_agentrl.actor.megatron_compat import TrackedP2PCommunicator
from mega_agentrl.actor.model.gpt_model import make_vocab_shard
from mega_agentrl.actor.model.heads import LogProbHead
from mega_agentrl.actor.training.pipeline_schedule import PipelineSchedule
from mega_agentrl.types.activity import WAIT_OVERDUE_S, current_activities
from tests.rank_shards import pack_rows

CPU = torch.device("cpu")


@pytest.fixture
def parts(one_model):
    """Return (wrapped chunk, its schedule, head)."""
    shape, groups, wrapped = one_model
    head = LogProbHead(
        temperature=1.0, vocab_shard=make_vocab_shard(shape, groups), num_positions=12
    )
    return wrapped, PipelineSchedule([wrapped], groups), head


def test_scoring_leaves_no_gradient_and_keeps_the_order(parts, batch):
    wrapped, schedule, head = parts
    wrapped.zero_grad_buffer()
    micros = [pack_rows(batch, rows, batch.mask_BT, CPU) for rows in ([0, 3], [1])]
    scores = schedule.forward_only(micros, head)
    assert [tuple(logp_RT.shape) for logp_RT, _ in scores] == [(2, 12), (1, 12)]
    assert not scores[0][0].requires_grad
    assert torch.equal(scores[1][0][0] != 0, batch.mask_BT[1])
    assert all(float(p.main_grad.abs().max()) == 0 for p in wrapped.module.parameters())


def test_a_wait_between_stages_is_tracked_with_the_ranks_that_it_waits_for(monkeypatch):
    activities = []
    communicator = object.__new__(TrackedP2PCommunicator)
    communicator.prev_rank, communicator.next_rank = 3, 5
    monkeypatch.setattr(
        P2PCommunicator,
        "_communicate",
        lambda self, **how: activities.append(current_activities()[-1]),
    )
    for recv_prev, recv_next, send_next in (
        (True, False, None),
        (False, True, torch.zeros(1)),
        (True, False, torch.zeros(1)),
    ):
        communicator._communicate(
            recv_prev=recv_prev,
            tensor_send_prev=None,
            recv_next=recv_next,
            tensor_send_next=send_next,
            tensor_shape=(1,),
        )
    assert {activity.overdue_after_s for activity in activities} == {WAIT_OVERDUE_S}
    assert [(activity.operation, activity.peer) for activity in activities] == [
        ("micro-batch receive", "rank 3"),
        ("micro-batch send/receive", "rank 5"),
        ("micro-batch send/receive", "rank 3 and rank 5"),
    ]
    assert not any(one.operation.startswith("micro-batch") for one in current_activities())


def test_directions_share_a_channel_only_where_no_two_ranks_use_both(parts, one_model):
    wrapped, _, _ = parts
    config = wrapped.module.config
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (False, True)
    PipelineSchedule([wrapped, wrapped], one_model[1])
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)

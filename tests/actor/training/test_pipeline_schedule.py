from __future__ import annotations

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mega_agentrl.actor.model.gpt_model import make_vocab_shard
from mega_agentrl.actor.model.heads import LogProbHead
from mega_agentrl.actor.training.objectives import SftObjective
from mega_agentrl.actor.training.packing import pack_rows
from mega_agentrl.actor.training.pipeline_schedule import PipelineSchedule, TrackedP2PCommunicator
from mega_agentrl.types.activity import WAIT_OVERDUE_S, current_activities

CPU = torch.device("cpu")


@pytest.fixture
def parts(one_model):
    """Return (wrapped chunk, its schedule, head)."""
    shape, groups, wrapped = one_model
    head = LogProbHead(
        temperature=1.0, vocab_shard=make_vocab_shard(shape, groups), num_positions=12
    )
    return wrapped, PipelineSchedule([wrapped], groups), head


def test_micro_batches_add_up_to_the_whole_batch(parts, batch):
    wrapped, schedule, head = parts
    outcomes = []
    for cut in ([[0, 1, 2, 3, 4, 5]], [[5, 1], [], [0], [2, 3, 4]]):
        wrapped.zero_grad_buffer()
        micros = [pack_rows(batch, rows, batch.mask_BT, CPU) for rows in cut]
        shares = schedule.forward_backward(micros, head, SftObjective(batch.mask_BT))
        assert len(shares) == len(cut)
        gradients = [p.main_grad.clone() for p in wrapped.module.parameters()]
        outcomes.append((sum(float(share["loss"]) for share in shares), gradients))
    (whole, expected), (parts, got) = outcomes
    assert parts == pytest.approx(whole, abs=1e-5)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_scoring_leaves_no_gradient_and_keeps_the_order(parts, batch):
    wrapped, schedule, head = parts
    wrapped.zero_grad_buffer()
    micros = [pack_rows(batch, rows, batch.mask_BT, CPU) for rows in ([3, 0], [1])]
    scores = schedule.forward_only(micros, head)
    assert [tuple(logp_RT.shape) for logp_RT, _ in scores] == [(2, 12), (1, 12)]
    assert not scores[0][0].requires_grad
    assert torch.equal(scores[1][0][0] != 0, batch.mask_BT[1])
    assert all(float(p.main_grad.abs().max()) == 0 for p in wrapped.module.parameters())


def test_who_waits_between_stages_says_for_whom(monkeypatch):
    seen = []
    communicator = object.__new__(TrackedP2PCommunicator)
    communicator.prev_rank, communicator.next_rank = 3, 5
    monkeypatch.setattr(
        P2PCommunicator, "_communicate", lambda self, **how: seen.append(current_activities()[-1])
    )
    tensor = torch.zeros(1)
    for recv_prev, send_prev, recv_next, send_next in (
        (True, None, False, None),
        (False, None, True, tensor),
        (True, None, False, tensor),
    ):
        communicator._communicate(
            recv_prev=recv_prev,
            tensor_send_prev=send_prev,
            recv_next=recv_next,
            tensor_send_next=send_next,
            tensor_shape=(1,),
        )
    assert {activity.overdue_after_s for activity in seen} == {WAIT_OVERDUE_S}
    assert [(activity.operation, activity.peer) for activity in seen] == [
        ("micro-batch receive", "rank 3"),
        ("micro-batch send/receive", "rank 5"),
        ("micro-batch send/receive", "rank 3 and rank 5"),
    ]
    assert not [
        activity
        for activity in current_activities()
        if activity.operation.startswith("micro-batch")
    ]


def test_directions_share_a_channel_only_where_no_two_ranks_use_both(parts, one_model):
    wrapped, _, _ = parts
    config = wrapped.module.config
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (False, True)
    PipelineSchedule([wrapped, wrapped], one_model[1])
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)

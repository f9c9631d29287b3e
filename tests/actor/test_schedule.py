from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.loss import SupervisedObjective
from mega_agentrl.actor.model import vocab_shard, wrap_data_parallel
from mega_agentrl.actor.packing import pack_rows
from mega_agentrl.actor.schedule import Head, Schedule


def test_micro_batches_add_up_to_the_whole_batch(one_model, batch):
    shape, groups, model = one_model
    wrapped = wrap_data_parallel(model, groups)
    schedule = Schedule(wrapped, groups)
    head = Head(temperature=1.0, shard=vocab_shard(shape, groups), num_positions=12)
    outcomes = []
    for cut in ([[0, 1, 2, 3, 4, 5]], [[5, 1], [], [0], [2, 3, 4]]):
        wrapped.zero_grad_buffer()
        micros = [pack_rows(batch, rows, batch.mask_BT, torch.device("cpu")) for rows in cut]
        shares = schedule.train(micros, head, SupervisedObjective(batch.mask_BT))
        assert len(shares) == len(cut)
        gradients = [p.main_grad.clone() for p in model.parameters()]
        outcomes.append((sum(float(share["loss"]) for share in shares), gradients))
    (whole, expected), (parts, got) = outcomes
    assert parts == pytest.approx(whole, abs=1e-5)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_scoring_leaves_no_gradient_and_keeps_the_order(one_model, batch):
    shape, groups, model = one_model
    wrapped = wrap_data_parallel(model, groups)
    head = Head(temperature=1.0, shard=vocab_shard(shape, groups), num_positions=12)
    cpu = torch.device("cpu")
    micros = [pack_rows(batch, rows, batch.mask_BT, cpu) for rows in ([3, 0], [1])]
    scores = Schedule(wrapped, groups).score(micros, head)
    assert [tuple(logp_RT.shape) for logp_RT, _ in scores] == [(2, 12), (1, 12)]
    assert not scores[0][0].requires_grad
    assert torch.equal(scores[1][0][0] != 0, batch.mask_BT[1])
    assert all(float(p.main_grad.abs().max()) == 0 for p in model.parameters())

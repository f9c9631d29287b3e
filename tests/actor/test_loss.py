from __future__ import annotations

import dataclasses

import pytest
import torch

from mega_agentrl.actor.loss import POLICY_METRICS, PolicyObjective, SupervisedObjective
from mega_agentrl.actor.packing import pack_rows
from mega_agentrl.config.choices import Aggregation
from mega_agentrl.config.schema import AlgoConfig

CPU = torch.device("cpu")


def value_of(objective, batch, cut):
    """Loss, gradient and token sums over a cut of the rows into micro-batches."""
    logp_BT = batch.old_logp_BT.clone().mul_(1.05).requires_grad_()
    entropy_BT = (0.5 * batch.old_logp_BT.abs()).requires_grad_()
    total, sums = 0.0, dict.fromkeys(("loss", "num_tokens"), 0.0)
    for rows in cut:
        micro = pack_rows(batch, rows, batch.mask_BT, CPU)
        loss, share = objective(micro, logp_BT[rows], entropy_BT[rows])
        total = total + loss
        for name, value in share.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    total.backward()
    assert sums["loss"] == pytest.approx(total.item(), abs=1e-6)
    return total.item(), logp_BT.grad, sums


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_the_cut_into_micro_batches_changes_nothing(aggregation, batch):
    algo = AlgoConfig(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    objective = PolicyObjective(algo, batch, batch.mask_BT)
    whole = value_of(objective, batch, [[0, 1, 2, 3, 4, 5]])
    cut = value_of(objective, batch, [[4], [], [5, 0], [1, 2, 3]])
    assert cut[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(cut[1], whole[1])
    assert cut[2] == pytest.approx(whole[2], abs=1e-4)
    assert set(POLICY_METRICS) <= set(whole[2])


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_add_up_to_the_whole(aggregation, size, batch):
    algo = AlgoConfig(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    rows = [0, 1, 2, 3, 4, 5]
    logp_BT = 1.05 * batch.old_logp_BT
    for objective in (
        PolicyObjective(algo, batch, batch.mask_BT),
        SupervisedObjective(batch.mask_BT),
    ):
        _, whole = objective(pack_rows(batch, rows, batch.mask_BT, CPU), logp_BT, -logp_BT)
        parts = []
        for rank in range(size):
            micro = pack_rows(batch, rows, batch.mask_BT, CPU, context_rank=rank, context_size=size)
            # A head leaves 0 where another rank predicts.
            here_BT = micro.predicted(logp_BT.size(1))
            _, share = objective(micro, logp_BT * here_BT, -logp_BT * here_BT)
            parts.append(share)
        for name, value in whole.items():
            total = sum(float(share[name]) for share in parts)
            assert total == pytest.approx(float(value), abs=1e-4), name
        assert min(float(share["num_tokens"]) for share in parts) > 0


def test_masked_tokens_pull_on_nothing(batch):
    objective = PolicyObjective(AlgoConfig(kl_coef=0.1), batch, batch.mask_BT)
    _, gradient_BT, sums = value_of(objective, batch, [[0, 1, 2, 3, 4, 5]])
    assert gradient_BT[~batch.mask_BT].abs().max() == 0
    assert sums["num_tokens"] == batch.mask_BT.sum()


def test_supervision_is_the_mean_negative_log_prob(batch):
    loss, gradient_BT, _ = value_of(
        SupervisedObjective(batch.mask_BT), batch, [[0, 1, 2], [3, 4, 5]]
    )
    expected = -1.05 * batch.old_logp_BT[batch.mask_BT].mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient_BT, -batch.mask_BT.float() / batch.mask_BT.sum())


def test_a_batch_without_what_it_needs_is_named(batch):
    bare = dataclasses.replace(batch, old_logp_BT=None, ref_logp_BT=None)
    with pytest.raises(ValueError, match="no old_logp_BT;"):
        PolicyObjective(AlgoConfig(), bare, batch.mask_BT)
    with pytest.raises(ValueError, match="no old_logp_BT, ref_logp_BT;"):
        PolicyObjective(AlgoConfig(), bare, batch.mask_BT, torch.ones_like(batch.mask_BT).float())

"""Objectives: splits of a batch add up to the whole; metrics and importance weights of losses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega_agentrl.actor.training.objectives import (
    CLIP_METRICS,
    compute_policy_loss,
    policy_metrics,
)
from mega_agentrl.config.algorithm_traits import LOSSES, LossTraits
from mega_agentrl.config.enums import KlPlacement, LossAggregation
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.errors import InputError
from tests.actor.training.objective_jobs import gradients
from tests.actor.training.whole_objective import loss_in_one_piece, objective, with_corrections
from tests.parallel.merge import assemble, relative_errors
from tests.parallel.reference import checkpoint_tensors, load_model, score
from tests.rank_shards import pack_rows, policy_objective, sft_objective
from tests.train_batches import select_rows
from tests.tree_batches import make_tree_batch

CPU = torch.device("cpu")
EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "my_loss.py")
LOG_RATIO_RT = torch.tensor([[1.0, 0.0, 9.0], [-1.0, -1.0, 0.0]])
"""Row 0: ratios e and 1, the third token masked. Row 1: 1/e, 1/e, 1."""
ADVANTAGE_RT = torch.tensor([[2.0, 2.0, 99.0], [-1.0, -1.0, -1.0]])
MASK_RT = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
OLD_RT = torch.full((2, 3), -2.0)
UNCUT_ROWS = [
    one for one in LOSSES.registered() if LOSSES.find_traits(one, LossTraits).needs_uncut_rows
]


def value_of(piece, batch, cut):
    """Return loss, gradient and metric sums for a split of the rows into micro-batches."""
    logp_BT = batch.old_logp_BT.clone().mul_(1.05).requires_grad_()
    entropy_BT = (0.5 * batch.old_logp_BT.abs()).requires_grad_()
    total, sums = 0.0, dict.fromkeys(("loss", "num_tokens"), 0.0)
    for rows in cut:
        micro = pack_rows(batch, rows, batch.mask_BT, CPU)
        loss, share = piece(micro, logp_BT[rows], entropy_BT[rows])
        total = total + loss
        for name, value in share.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    total.backward()
    assert sums["loss"] == pytest.approx(total.item(), abs=1e-6)
    return total.item(), logp_BT.grad, sums


@pytest.mark.parametrize("loss", LOSSES.registered())
@pytest.mark.parametrize("aggregation", LossAggregation)
def test_the_split_into_micro_batches_changes_nothing(aggregation, loss, batch):
    algo = AlgoConfig(loss_aggregation=aggregation, loss=loss, kl_coef=0.1, entropy_coef=0.01)
    piece = policy_objective(algo, batch)
    whole = value_of(piece, batch, [[0, 1, 2, 3, 4, 5]])
    cut = value_of(piece, batch, [[4], [], [0, 5], [1, 2, 3]])
    assert cut[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(cut[1], whole[1])
    assert cut[2] == pytest.approx(whole[2], abs=1e-4)
    assert set(policy_metrics(algo)) <= set(whole[2])


class RefusesReads(TorchDispatchMode):
    """Raises where the host reads what the device has computed, for which a GPU would be idle."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_mask = any(one is not None and one.dtype == torch.bool for one in indices)
        assert not is_mask and name not in self.READS, f"{name} waits for the device"
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["sft", *LOSSES.registered()])
def test_no_objective_waits_for_the_device(loss, batch):
    piece = sft_objective(batch)
    if loss != "sft":
        algo = AlgoConfig(loss=loss, kl_coef=0.1, entropy_coef=0.01)
        piece = policy_objective(algo, batch)
    micro = pack_rows(batch, [0, 1, 2], batch.mask_BT, CPU)
    logp_RT = batch.old_logp_BT[:3].clone().requires_grad_()
    with RefusesReads():
        total, _ = piece(micro, logp_RT, logp_RT.detach().abs())
        total.backward()
    assert logp_RT.grad.abs().sum() > 0


@pytest.mark.parametrize("aggregation", LossAggregation)
def test_a_trajectory_of_several_rows_counts_once(aggregation, batch):
    """Each row, and the same cut into two rows, whose tokens are trained on in one of them."""
    algo = AlgoConfig(loss_aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    cut = select_rows(batch, [row for row in range(6) for _ in range(2)])
    is_early_BT = torch.arange(batch.mask_BT.size(1)).expand_as(cut.mask_BT) < 3
    is_first_B1 = torch.tensor([[True], [False]] * 6)
    cut = cut.with_fields(
        mask_BT=cut.mask_BT & (is_early_BT == is_first_B1),
        trajectory_B=torch.arange(6).repeat_interleave(2),
    )
    whole = value_of(policy_objective(algo, batch), batch, [range(6)])
    parts = value_of(policy_objective(algo, cut), cut, [[0, 1, 2], [5, 4, 11], [3, *range(6, 11)]])
    assert parts[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(parts[1].view(6, 2, -1).sum(1), whole[1])


@pytest.mark.parametrize("aggregation", LossAggregation)
@pytest.mark.parametrize("size", [2, 3])
def test_context_ranks_add_up_to_the_whole(aggregation, size, batch):
    algo = AlgoConfig(loss_aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    rows = [0, 1, 2, 3, 4, 5]
    logp_BT = 1.05 * batch.old_logp_BT
    for piece in (policy_objective(algo, batch), sft_objective(batch)):
        _, whole = piece(pack_rows(batch, rows, batch.mask_BT, CPU), logp_BT, -logp_BT)
        parts = []
        for rank in range(size):
            micro = pack_rows(batch, rows, batch.mask_BT, CPU, context_rank=rank, context_size=size)
            # A head leaves 0 where another rank predicts.
            here_BT = micro.predicted_mask(logp_BT.size(1))
            _, share = piece(micro, logp_BT * here_BT, -logp_BT * here_BT)
            parts.append(share)
        for name, value in whole.items():
            total = sum(float(share[name]) for share in parts)
            assert total == pytest.approx(float(value), abs=1e-4), name
        assert min(float(share["num_tokens"]) for share in parts) > 0


def test_sft_loss_is_the_mean_negative_log_prob(batch):
    loss, gradient_BT, _ = value_of(sft_objective(batch), batch, [[0, 1, 2], [3, 4, 5]])
    expected = -1.05 * batch.old_logp_BT[batch.mask_BT].mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient_BT, -batch.mask_BT.float() / batch.mask_BT.sum())


def test_fields_that_a_batch_lacks_are_named(batch):
    bare = dataclasses.replace(batch, old_logp_BT=None, advantage_BT=None, ref_logp_BT=None)
    with pytest.raises(InputError) as caught:
        policy_objective(AlgoConfig(), bare)
    assert caught.value.got == ["advantage_BT"], "the first step of an update needs no old_logp_BT"
    with pytest.raises(InputError) as caught:
        policy_objective(AlgoConfig(), bare, torch.ones(batch.mask_BT.shape))
    assert caught.value.got == ["advantage_BT", "ref_logp_BT"]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("loss", LOSSES.registered())
def test_splits_have_the_gradient_of_the_objective_in_one_piece(loss, corrected, batch):
    """Gradients of log-probs and entropies, over micro-batches and context ranks."""
    if corrected:
        batch = with_corrections(batch)
    algo = objective(loss)
    logp_BT = (batch.old_logp_BT + 0.2 * batch.advantage_BT).requires_grad_()
    entropy_BT = (0.5 * logp_BT.detach().abs()).requires_grad_()
    expected = torch.autograd.grad(
        loss_in_one_piece(algo, batch, logp_BT, entropy_BT), (logp_BT, entropy_BT)
    )
    assert expected[0][batch.mask_BT].abs().sum() > 0.1
    piece = policy_objective(algo, batch)
    for num_context in (1, 2) if loss not in UNCUT_ROWS else (1,):
        total = 0.0
        for rank in range(num_context):
            for rows in ([4], [], [0, 5], [1, 2, 3]):
                cut = {"context_rank": rank, "context_size": num_context}
                micro = pack_rows(batch, rows, batch.mask_BT, CPU, **cut)
                here_RT = micro.predicted_mask(logp_BT.size(1))
                part, _ = piece(micro, logp_BT[rows] * here_RT, entropy_BT[rows] * here_RT)
                total = total + part
        got = torch.autograd.grad(total, (logp_BT, entropy_BT))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("loss", UNCUT_ROWS)
def test_a_ratio_over_a_divided_row_is_a_bug(loss, batch):
    piece = policy_objective(objective(loss), batch)
    micro = pack_rows(batch, [0], batch.mask_BT, CPU, context_rank=0, context_size=2)
    with pytest.raises(AssertionError):
        piece(micro, batch.old_logp_BT[:1], batch.old_logp_BT[:1])


def test_a_kl_in_the_reward_is_reported_and_has_no_gradient(batch):
    rows = [0, 1, 2, 3, 4, 5]
    in_loss, in_reward, without = (
        value_of(policy_objective(AlgoConfig(**algo), batch), batch, [rows])
        for algo in ({"kl_coef": 0.5}, {"kl_coef": 0.5, "kl_placement": KlPlacement.reward}, {})
    )
    assert in_reward[2]["ref_kl"] == in_loss[2]["ref_kl"] > 0
    assert torch.equal(in_reward[1], without[1]) and not torch.equal(in_loss[1], without[1])


@pytest.mark.parametrize(
    "layout",
    [{"data": 2}, pytest.param({"context": 2}, marks=pytest.mark.extended)],
    ids=["data", "context"],
)
def test_ranks_have_the_gradient_of_the_objective_in_one_piece(
    layout, rank_pool, train_config, checkpoints
):
    """Gradients of the weights for each loss with importance weights, against transformers.

    The batch has forked trees. The example's loss is loaded in each rank's process.
    """
    batch = make_tree_batch()
    batch.mask_BT[1] = False
    cut = UNCUT_ROWS if "context" in layout else []
    losses = [one for one in LOSSES.registered() if one not in cut]
    algos = [objective(loss) for loss in (*losses, EXAMPLE)]
    config = train_config(checkpoints[True], **layout)
    model = load_model(checkpoints[True])
    logp_BT, entropy_BT = score(model, batch, config.rollout.temperature)
    # Whole rows are off, too: else no ratio of a row leaves the range.
    noise_BT = batch.old_logp_BT + 4.0 + torch.linspace(-0.4, 0.4, batch.num_rows)[:, None]
    near = with_corrections(batch).with_fields(
        old_logp_BT=logp_BT.detach() + noise_BT, ref_logp_BT=logp_BT.detach() - noise_BT
    )
    ranks = rank_pool.run(gradients, config.parallel.world_size, config, near, algos)
    for number, algo in enumerate(algos):
        model.zero_grad()
        loss = loss_in_one_piece(algo, near, logp_BT, entropy_BT)
        loss.backward(retain_graph=True)
        expected = checkpoint_tensors(model, gradients=True)
        shapes = {name: value.shape for name, value in expected.items()}
        got = assemble([rank[number][1] for rank in ranks], shapes, atol=1e-5)
        errors = relative_errors(got, expected)
        assert max(errors.values()) < 1e-4, (algo.loss, errors)
        for rank in ranks:
            stats = rank[number][0]
            assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
            assert tuple(stats.metrics) == policy_metrics(algo)
            assert 0.05 < stats.metrics["clipfrac"] < 0.95


def term(loss, correction_RT=None):
    """Return loss, metrics, and the gradient of the summed loss."""
    values = {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 1.5}
    options = {name: values[name] for name in LOSSES.find(loss).options if name in values}
    algo = AlgoConfig(loss=loss, loss_options=options)
    logp_RT = (OLD_RT + LOG_RATIO_RT).requires_grad_()
    loss_RT, info = compute_policy_loss(algo, logp_RT, OLD_RT, ADVANTAGE_RT, MASK_RT, correction_RT)
    loss_RT.sum().backward()
    return loss_RT.detach(), info, logp_RT.grad


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        # Above the range and A > 0: the bound, no gradient. Below it and A < 0: the bound too.
        ("clipped", [[-2.6, -2, 0], [0.8, 0.8, 1]], [[0, -2, 0], [0, 0, 1]]),
        # The same values; above the range the gradient keeps the factor 1.3.
        ("balanced", [[-2.6, -2, 0], [0.8, 0.8, 1]], [[-2.6, -2, 0], [0, 0, 1]]),
        # Row 0: ratio exp(1/2) = 1.65 above 1.3. Row 1: exp(-2/3) = .51 below .8.
        ("gspo", [[-2.6, -2.6, 0], [0.8, 0.8, 0.8]], [[0, 0, 0], [0, 0, 0]]),
        # Each row is one turn, whose ratio is that of the row.
        ("atpo", [[-2.6, -2.6, 0], [0.8, 0.8, 0.8]], [[0, 0, 0], [0, 0, 0]]),
        # As clipped, with advantages times 1 + f: f is 1, since e is above the dual clip and counts
        # for nothing, and the ratios of row 1 are at most 1.
        ("future_kl", [[-5.2, -4, 0], [1.6, 1.6, 2]], [[0, -4, 0], [0, 0, 2]]),
        # Weights 1.3 and 1, .8, .8, 1 on the log-probs -1, -2 and -3, -3, -2.
        ("cispo", [[2.6, 4, 0], [-2.4, -2.4, -2]], [[-2.6, -2, 0], [0.8, 0.8, 1]]),
    ],
)
def test_each_term_has_the_loss_and_gradient_worked_out_by_hand(loss, value, gradient):
    loss_RT, _, gradient_RT = term(loss)
    torch.testing.assert_close(loss_RT, torch.tensor(value, dtype=torch.float32))
    torch.testing.assert_close(gradient_RT, torch.tensor(gradient, dtype=torch.float32))


@pytest.mark.parametrize("loss", LOSSES.registered())
def test_every_loss_reports_the_same_metrics(loss):
    _, info, _ = term(loss)
    own = ("future_weight",) if loss == "future_kl" else ()
    assert tuple(info) == (*CLIP_METRICS, *own)
    assert all(value.ndim == 0 and not value.requires_grad for value in info.values())
    clipfrac = 1.0 if loss in ("gspo", "atpo") else 0.6
    assert float(info["clipfrac"]) == pytest.approx(clipfrac)
    assert float(info["approx_kl"]) == pytest.approx(1 / 5)
    assert float(info["clipfrac_lower"]) == 0


@pytest.mark.parametrize("loss", LOSSES.registered())
def test_importance_weights_multiply_loss_and_gradient_of_each_token(loss):
    weight_RT = torch.tensor([[0.5, 0.0, torch.nan], [1.0, 2.0, 0.25]])
    kept_RT = weight_RT.masked_fill(~MASK_RT, 0.0)
    plain_RT, info, gradient_RT = term(loss)
    loss_RT, weighted_info, weighted_RT = term(loss, weight_RT)
    torch.testing.assert_close(loss_RT, plain_RT * kept_RT)
    assert weighted_info == info
    torch.testing.assert_close(weighted_RT, gradient_RT * kept_RT)

"""`algo.policy_loss`: golden values and gradients, and shards that add up."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo import advantage
from mega_agentrl.algo.policy_loss import (
    AGGREGATION_MODES,
    aggregate,
    atpo,
    cispo,
    clipped,
    dapo,
    dr_grpo,
    future_kl,
    gspo,
    loss_denominator,
)
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("policy_loss_and_kl")
MODE_OF = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_sum_norm",
}
RANGE = {"clip_low": 0.2, "clip_high": 0.2}
LONGEST = {"max_response_tokens": 100}
FUTURE = {
    **RANGE,
    "clip_dual": 3.0,
    "gamma": 0.5,
    "bound": 0.3,
    "high_only": False,
    "weight": 2.0,
    "max_penalized_ratio": 4.0,
}


@pytest.mark.parametrize("name", MODE_OF)
@pytest.mark.parametrize("case", GOLDEN["policy_loss"], ids=lambda case: case["name"])
def test_loss_metrics_and_gradient_are_those_of_verl(case, name):
    expected = case["verl"][name]
    logp = torch.tensor(case["log_prob"], requires_grad=True)
    mask = torch.tensor(case["mask"])
    loss_BT, info = clipped(
        logp,
        torch.tensor(case["old_log_prob"]),
        torch.tensor(case["advantages"]),
        mask,
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        clip_dual=case["clip_ratio_c"],
    )
    loss = aggregate(loss_BT, mask, MODE_OF[name], max_response_tokens=mask.shape[1])
    if MODE_OF[name] == "seq_sum_norm":  # the reference of that time sums over responses
        loss = loss * mask.any(dim=1).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert {key: value.item() for key, value in info.items()} == pytest.approx(
        {key: expected[key] for key in ("clipfrac", "clipfrac_lower", "approx_kl")}, abs=1e-5
    )
    torch.testing.assert_close(
        logp.grad, torch.tensor(expected["dloss_dlogp"]), atol=1e-5, rtol=1e-5
    )


def test_a_huge_ratio_stays_finite():
    logp = torch.tensor([[0.0]], requires_grad=True)
    loss, _ = clipped(logp, torch.tensor([[-500.0]]), -torch.ones(1, 1), torch.ones(1, 1), **RANGE)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 4))
def test_shards_with_the_global_denominator_add_up(mode, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) > 0.4
    whole = aggregate(loss, mask, mode, **LONGEST)
    total = loss_denominator(mask, mode, **LONGEST)
    parts = [
        aggregate(loss[rows], mask[rows], mode, denominator=total)
        for rows in (slice(0, cut), slice(cut, 5))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_fully_masked_row_changes_no_aggregation():
    loss = torch.tensor([[1.0, 2.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    for mode in AGGREGATION_MODES:
        torch.testing.assert_close(
            aggregate(loss, mask, mode, **LONGEST), aggregate(loss[:1], mask[:1], mode, **LONGEST)
        )


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("width", [10, 100])
def test_dr_grpo_divides_by_responses_and_the_longest_possible_response(copies, width):
    """Ten tokens of each response, of 100 possible, with a loss of 1."""
    mask = (torch.arange(width) < 10).expand(4 * copies, width)
    loss = torch.ones(mask.shape, requires_grad=True)
    total = aggregate(loss, mask, "seq_sum_norm", **LONGEST)
    assert total.item() == pytest.approx(0.1)
    (gradient,) = torch.autograd.grad(total, loss)
    assert gradient[0, 0].item() == pytest.approx(1 / (4 * copies * 100))


@pytest.mark.parametrize("got", [None, 0])
def test_dr_grpo_needs_the_longest_possible_response(got):
    with pytest.raises(InputError) as caught:
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "seq_sum_norm", max_response_tokens=got)
    assert (caught.value.name, caught.value.got) == ("max_response_tokens", got)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000))
def test_a_trajectory_that_is_cut_into_rows_counts_once(mode, seed):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) > 0.4
    start = torch.randint(0, 7, (3, 1), generator=generator)
    parts = [mask & (torch.arange(6) < start), mask & (torch.arange(6) >= start)]
    rows = torch.cat(parts)
    owner = torch.tensor([7, 2, 5] * 2)
    total = loss_denominator(rows, mode, trajectory_B=owner, **LONGEST)
    num_tokens = mask.sum(1).repeat(2)
    got = [
        aggregate(loss, part, mode, denominator=total, num_tokens_B=number)
        for part, number in zip(parts, num_tokens.split(3), strict=True)
    ]
    torch.testing.assert_close(sum(got), aggregate(loss, mask, mode, **LONGEST))


def test_weight_of_a_shared_token_depends_on_the_aggregation():
    """A token of two trajectories, of 10 and 5 tokens and with advantages 1 and -1."""
    mask = torch.arange(10)[None] < torch.tensor([[10], [5]])
    logp = torch.zeros(2, 10, requires_grad=True)
    grid = torch.tensor([[1.0], [-1.0]]).expand(2, 10)
    loss, _ = clipped(logp, torch.zeros(2, 10), grid, mask, **RANGE)
    for mode, expected in (("seq_mean_token_mean", -0.05), ("token_mean", 0.0)):
        (gradient,) = torch.autograd.grad(aggregate(loss, mask, mode), logp, retain_graph=True)
        assert -gradient[:, 0].sum().item() == pytest.approx(expected, abs=1e-6)


def _random(seed, *, spread=0.3):
    """float64 log-probs, old ones, advantages and a mask; no ratio lies at a kink of the losses."""
    generator = torch.Generator().manual_seed(seed)
    old, logp, gain = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    return old - 2 + spread * logp, old - 2, gain, mask


def _check_gradient(loss, logp):
    """Autograd against central differences, entry by entry."""
    point = logp.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(point), point)
    step, want = 1e-6, torch.zeros_like(logp)
    for index in range(logp.numel()):
        nudge = torch.zeros_like(logp).view(-1)
        nudge[index] = step
        nudge = nudge.view_as(logp)
        want.view(-1)[index] = (loss(logp + nudge) - loss(logp - nudge)) / (2 * step)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize(
    ("loss_of", "options", "spread"),
    [
        pytest.param(clipped, {}, 0.8, id="clipped"),
        pytest.param(clipped, {"clip_dual": 1.5}, 0.8, id="dual clip"),
        pytest.param(gspo, {}, 0.3, id="gspo"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_the_slope(mode, loss_of, options, spread, seed):
    logp, old, gain, mask = _random(seed, spread=spread)
    gain = gain[:, 0] if loss_of is gspo else gain

    def loss(point):
        value, _ = loss_of(point, old, gain, mask, **RANGE, **options)
        return aggregate(value, mask, mode, **LONGEST)

    _check_gradient(loss, logp)


def test_gspo_weighs_each_token_by_the_mean_ratio_of_its_sequence():
    # Mean log-ratios 0.1 and 0.5: ratios 1.105 and 1.649; the second is cut at 1.2 for A > 0.
    logp = torch.tensor([[0.3, -0.1, 9.0], [0.5, 0.5, 0.5]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss, info = gspo(logp, torch.zeros(2, 3), torch.tensor([-2.0, 3.0]), mask, **RANGE)
    first = 2 * 2.718281828**0.1
    expected = torch.tensor([[first, first, 0], [-3.6] * 3])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert info["clipfrac"].item() == pytest.approx(3 / 5)
    aggregate(loss, mask, "seq_mean_token_mean").backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([first / 4, first / 4, 0], abs=1e-5)
    assert logp.grad[1].tolist() == [0.0] * 3


def test_gspo_s_weight_of_a_token_changes_no_other_token():
    """Two tokens with ratio 1 and advantage 1, weighted 2 and 0; a masked token gets nothing."""
    logp = torch.zeros(1, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    loss, _ = gspo(logp, torch.zeros(1, 3), torch.ones(1), mask, **RANGE)
    aggregate(loss * torch.tensor([[2.0, 0, 9]]), mask, "seq_mean_token_mean").backward()
    assert logp.grad is not None and logp.grad.tolist() == [[-1, 0, 0]]


@pytest.mark.parametrize("loss_of", [gspo, atpo])
def test_a_mean_log_ratio_is_bounded_at_10(loss_of):
    """The ratio of a negative advantage has no upper clip; a far outlier has no gradient."""
    logp = torch.tensor([[9.0, 9.0], [30.0, 2.0]], requires_grad=True)
    gain = -torch.ones(2) if loss_of is gspo else -torch.ones(2, 2)
    loss, _ = loss_of(logp, torch.zeros(2, 2), gain, torch.ones(2, 2), **RANGE)
    loss.sum().backward()
    want = torch.tensor([[9.0, 9.0], [10.0, 10.0]]).exp()
    torch.testing.assert_close(loss.detach(), want)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, want * torch.tensor([[1.0], [0.0]]))


def test_atpo_weighs_each_token_by_the_mean_ratio_of_its_turn():
    # Turns of mean log-ratios 0.1 and 0.5: ratios 1.105 and 1.649; the second is cut at 1.2.
    logp = torch.tensor([[0.3, -0.1, 9.0, 0.5, 0.5]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    gain = torch.tensor([[-2.0, 1.0, 9.0, 3.0, -1.0]])
    loss, info = atpo(logp, torch.zeros(1, 5), gain, mask, **RANGE)
    first, second = 2.718281828**0.1, 2.718281828**0.5
    expected = [2 * first, -first, 0, -3.6, second]
    assert loss[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert info["clipfrac"].item() == pytest.approx(1 / 4)
    assert info["approx_kl"].item() == pytest.approx(-1.2 / 4)
    loss.sum().backward()
    assert logp.grad is not None
    # The ratio is the turn's, the gradient the token's own.
    assert logp.grad[0].tolist() == pytest.approx([2 * first, -first, 0, 0, second], abs=1e-5)


@pytest.mark.parametrize("seed", [1, 2])
def test_atpo_s_gradient_is_that_of_the_turn_s_ratio_if_its_tokens_have_equal_advantages(seed):
    """Each row of gspo is one turn; in one row of atpo, turns are separated by a masked token."""
    logp, old, gain, _ = _random(seed, spread=0.8)
    gain, joined = gain[:, 0], torch.ones(4, 7, dtype=torch.bool)
    joined[:, 6] = False

    def in_turns(grid_BT):
        return torch.nn.functional.pad(grid_BT, (0, 1)).reshape(1, -1)

    gradients = []
    for loss_of, parts in (
        (gspo, (old, gain, torch.ones(4, 6))),
        (atpo, (in_turns(old), in_turns(gain[:, None].expand(4, 6)), joined.reshape(1, -1))),
    ):
        point = logp.clone().requires_grad_()
        loss, info = loss_of(point if loss_of is gspo else in_turns(point), *parts, **RANGE)
        gradients += torch.autograd.grad(loss.sum(), point)
    assert 0 < info["clipfrac"] < 1
    torch.testing.assert_close(*gradients)


def test_future_kl_weighs_each_token_by_the_log_ratios_behind_it():
    # Discounted sums .1 + .5 * .3, .4 - .5 * .2 and -.2; the second factor is cut at 1.3.
    logp = torch.tensor([[0.1, 9.0, 0.4, -0.2]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1]])
    gain = torch.tensor([[1.0, 9.0, -1.0, 2.0]])
    loss, info = future_kl(logp, torch.zeros(1, 4), gain, mask, **FUTURE)
    factors = [2.718281828**0.25, 1.3, 2.718281828**-0.2]
    expected = [
        -(1 + 2 * factors[0]) * 2.718281828**0.1,
        0,
        (1 + 2 * factors[1]) * 2.718281828**0.4,
        -2 * (1 + 2 * factors[2]) * 2.718281828**-0.2,
    ]
    assert loss[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert info["future_weight"].item() == pytest.approx(sum(factors) / 3)
    loss.sum().backward()
    assert logp.grad is not None
    # The factor is a constant, so each token pulls on itself alone.
    assert logp.grad[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_future_kl_s_bounds_for_penalized_tokens():
    """The ratio 5 is above the dual clip: it counts in no factor. Two of them drop the row."""
    ratio = torch.tensor([[2.0, 5.0, 1.0], [5.0, 5.0, 1.0]])
    options = {**FUTURE, "gamma": 1.0, "weight": 1.0, "max_penalized_ratio": 1.5}
    parts = (torch.zeros(2, 3), -torch.ones(2, 3), torch.ones(2, 3))
    loss, info = future_kl(ratio.log(), *parts, **options)
    # All factors are 1, also that of the ratio 2 (exp(ln 2) is 2).
    assert loss.tolist() == [[pytest.approx(4), pytest.approx(6), pytest.approx(2)], [0, 0, 0]]
    assert info["clipfrac_lower"].item() == pytest.approx(3 / 6)
    plain, _ = future_kl(ratio.log(), *parts, **(options | {"max_penalized_ratio": 3.0}))
    assert plain[0, 0].item() == pytest.approx(2 * (1 + 1.3))


def test_future_kl_is_clipped_twice_as_strong_before_the_first_update():
    logp, _, gain, mask = _random(3)
    loss, _ = future_kl(logp, logp.detach(), gain, mask, **(FUTURE | {"weight": 1.0}))
    same, _ = clipped(logp, logp.detach(), gain, mask, **RANGE, clip_dual=3.0)
    torch.testing.assert_close(loss, 2 * same)


def test_cispo_clips_the_weight_and_not_the_gradient():
    # Ratios 1, e^7 and e^-2, the last two clipped to 1.2 and 0.8; the fourth token is masked.
    logp = torch.tensor([[-1.0, -2.0, -3.0, float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.0, -9.0, -1.0, 0.0]])
    gain = torch.tensor([[2.0, 1.0, -1.0, 5.0]])
    loss, info = cispo(logp, old, gain, torch.tensor([[1, 1, 1, 0]]), **RANGE)
    assert loss[0].tolist() == pytest.approx([2.0, 2.4, -2.4, 0.0])
    assert info["clipfrac"].item() == pytest.approx(2 / 3)
    loss.sum().backward()
    assert logp.grad[0].tolist() == pytest.approx([-2.0, -1.2, 0.8, 0.0])


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize(
    "loss_of",
    [clipped, gspo, atpo, cispo, partial(future_kl, **FUTURE)],
    ids=["clipped", "gspo", "atpo", "cispo", "future_kl"],
)
def test_masked_values_do_not_change_the_losses(loss_of, junk):
    logp, old, gain, mask = (value.float() for value in _random(7))
    gain = gain[:, 0] if loss_of is gspo else gain
    plain, info = loss_of(logp, old, gain, mask, **RANGE)
    off = mask == 0
    dirty = logp.masked_fill(off, junk).requires_grad_()
    dirty_gain = gain if loss_of is gspo else gain.masked_fill(off, junk)
    got, got_info = loss_of(dirty, old.masked_fill(off, -junk), dirty_gain, mask, **RANGE)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(got_info, info)
    got.sum().backward()
    assert dirty.grad is not None and (dirty.grad[off] == 0).all()
    assert dirty.grad.isfinite().all()


def test_presets_are_the_clipped_loss_with_range_and_aggregation_of_the_papers():
    logp, old, gain, mask = _random(3, spread=0.8)
    for preset, high, mode in ((dapo, 0.28, "token_mean"), (dr_grpo, 0.2, "seq_sum_norm")):
        got, info = preset(logp, old, gain, mask, **LONGEST)
        loss, same = clipped(logp, old, gain, mask, clip_low=0.2, clip_high=high)
        assert torch.equal(got, aggregate(loss, mask, mode, **LONGEST))
        assert info == same
    reward, group = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)
    got = advantage.grpo(reward, group, norm_by_std=dr_grpo.norm_by_std)
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25] and dapo.norm_by_std
    half, _ = dapo(logp, old, gain, mask, denominator=2 * mask.sum())
    torch.testing.assert_close(half, dapo(logp, old, gain, mask)[0] / 2)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_soft_is_hard_on_shared_tokens_under_token_mean_with_equal_ratios(seed):
    """Rows fork from one another; the gradients of a token's copies add up to the same."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(3, 9, (5,), generator=generator)
    mask = torch.arange(8)[None] < length[:, None]
    token = torch.arange(40).view(5, 8)
    for row in range(1, 5):
        parent = int(torch.randint(0, row, (), generator=generator))
        shared = int(
            torch.randint(0, int(min(length[row], length[parent])), (), generator=generator)
        )
        token[row, :shared] = token[parent, :shared]
    scalar = torch.randn(5, generator=generator)
    shared_logp = torch.randn(40, generator=generator)
    gradients = []
    for grid in (advantage.broadcast(scalar, mask), advantage.arpo_hard(scalar, token, mask)):
        logp = (shared_logp + 0.05).requires_grad_()
        loss, _ = clipped(logp[token], shared_logp[token], grid, mask, **RANGE)
        gradients.append(torch.autograd.grad(aggregate(loss, mask, "token_mean"), logp)[0])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(InputError) as caught:
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")
    assert (caught.value.name, caught.value.got) == ("mode", "mean")

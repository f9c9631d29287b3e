from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.actor.vocab.partial_softmax import (
    MAX,
    SUM,
    TARGET,
    WEIGHTED,
    empty_stats,
    logit_grad_coefficients,
    logp_entropy_from_stats,
    merge_stats,
)

CPU = torch.device("cpu")
VALID = torch.tensor([True])


def stats(logits, target):
    """Return the `[4, 1]` statistics of one token; target None means another part holds it."""
    logits = torch.tensor(logits, dtype=torch.float64)
    x = logits - logits.max()
    held = -torch.inf if target is None else logits[target].item()
    values = [logits.max().item(), x.exp().sum().item(), (x.exp() * x).sum().item(), held]
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_two_parts_by_hand():
    # Logits ln 1 | ln 3: probabilities 1/4 and 3/4, entropy ln 4 - 3/4 ln 3.
    whole = merge_stats(torch.stack([stats([0.0], None), stats([math.log(3)], 0)]))
    assert whole[MAX].item() == pytest.approx(math.log(3))
    assert whole[SUM].item() == pytest.approx(4 / 3)
    assert whole[WEIGHTED].item() == pytest.approx(-math.log(3) / 3)
    assert whole[TARGET].item() == pytest.approx(math.log(3))
    logp, entropy, _ = logp_entropy_from_stats(whole, VALID)
    assert logp.exp().item() == pytest.approx(0.75)
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))


def test_merging_is_the_same_in_any_grouping_and_order():
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(5, 4, 7, dtype=torch.float64, generator=generator)
    parts[:, SUM] = parts[:, SUM].exp()
    parts[:, MAX] *= 50
    at_once = merge_stats(parts)
    torch.testing.assert_close(merge_stats(parts[torch.randperm(5, generator=generator)]), at_once)
    left = torch.stack([merge_stats(parts[:2]), merge_stats(parts[2:])])
    torch.testing.assert_close(merge_stats(left), at_once)


def test_a_part_without_columns_changes_nothing():
    part = stats([3.0, 1e4, -1e4], 0)
    for order in ([part, empty_stats(1, CPU)], [empty_stats(1, CPU), part]):
        torch.testing.assert_close(merge_stats(torch.stack(order)), part, rtol=0, atol=0)


def test_nan_and_ignored_tokens():
    whole = stats([1.0, 2.0], 0)
    whole[MAX] = torch.nan
    assert merge_stats(torch.stack([empty_stats(1, CPU), whole]))[SUM].isnan().all()
    logp, entropy, _ = logp_entropy_from_stats(empty_stats(1, CPU), ~VALID)
    assert logp.tolist() == entropy.tolist() == [0.0]


def gradient(logits, target, grad_logp, grad_entropy, temperature, valid=VALID):
    """Return the coefficients and the gradient of the raw logits that a kernel computes."""
    raw = torch.tensor(logits, dtype=torch.float64)
    softmax = logp_entropy_from_stats(stats((raw / temperature).tolist(), target), valid)[2]
    found = logit_grad_coefficients(softmax, grad_logp, grad_entropy, temperature, torch.float64)
    x = (raw - found.max_raw_logit_N) / temperature
    pull = found.prob_coef_N + (0 if found.entropy_coef_N is None else found.entropy_coef_N * x)
    here = torch.nn.functional.one_hot(torch.tensor(target), len(logits))
    return found, found.target_coef_N * here - x.exp() * pull


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_coefficients_give_the_gradient_of_autograd(temperature):
    logits, target = [0.3, -1.2, 2.0, 0.7], 3
    raw = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logp = (raw / temperature).log_softmax(0)
    entropy = -(logp.exp() * logp).sum()
    (1.7 * logp[target] - 0.4 * entropy).backward()
    given = torch.tensor([1.7]), torch.tensor([-0.4])
    _, got = gradient(logits, target, *given, temperature)
    torch.testing.assert_close(got, raw.grad, rtol=1e-6, atol=1e-7)


def test_one_gradient_alone_by_hand():
    # p = 1/4, 3/4: d logp_1 = (-1/4, 1/4); dH_j = -p_j (ln p_j + H).
    logits = [0.0, math.log(3)]
    found, got = gradient(logits, 1, torch.tensor([1.0]), None, 1.0)
    assert found.entropy_coef_N is None
    assert got.tolist() == pytest.approx([-0.25, 0.25])
    entropy = math.log(4) - 0.75 * math.log(3)
    _, got = gradient(logits, 1, None, torch.tensor([1.0]), 1.0)
    expected = [-p * (math.log(p) + entropy) for p in (0.25, 0.75)]
    assert got.tolist() == pytest.approx(expected)
    ignored, _ = gradient(logits, 1, torch.tensor([torch.nan]), torch.tensor([1.0]), 1.0, ~VALID)
    assert ignored.target_coef_N == ignored.prob_coef_N == ignored.entropy_coef_N == 0
    assert found.slice_tokens(slice(0, 0)).max_raw_logit_N.numel() == 0

"""Statistics of parts of the vocabulary by hand; whole heads are compared in `vocab_cases`."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.actor.vocab.partial_softmax import (
    MAX,
    SUM,
    TARGET,
    WEIGHTED,
    logit_grad_coefficients,
    logp_entropy_from_stats,
    merge_stats,
)

VALID = torch.tensor([True])


def stats(logits, target):
    """Return the `[4, 1]` statistics of one token; target None means another part holds it."""
    logits = torch.tensor(logits, dtype=torch.float64)
    x = logits - logits.max()
    held = -torch.inf if target is None else logits[target].item()
    values = [logits.max().item(), x.exp().sum().item(), (x.exp() * x).sum().item(), held]
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_two_merged_parts_have_the_softmax_of_the_whole():
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


def gradient(logits, target, grad_logp, grad_entropy, valid=VALID):
    """Return the coefficients and the gradient of the raw logits that a kernel computes."""
    raw = torch.tensor(logits, dtype=torch.float64)
    softmax = logp_entropy_from_stats(stats(logits, target), valid)[2]
    found = logit_grad_coefficients(softmax, grad_logp, grad_entropy, 1.0, torch.float64)
    x = raw - found.max_raw_logit_N
    pull = found.prob_coef_N + (0 if found.entropy_coef_N is None else found.entropy_coef_N * x)
    here = torch.nn.functional.one_hot(torch.tensor(target), len(logits))
    return found, found.target_coef_N * here - x.exp() * pull


def test_each_output_has_the_gradient_worked_out_by_hand():
    # p = 1/4, 3/4: d logp_1 = (-1/4, 1/4); dH_j = -p_j (ln p_j + H).
    logits = [0.0, math.log(3)]
    found, grad = gradient(logits, 1, torch.tensor([1.0]), None)
    assert found.entropy_coef_N is None
    assert grad.tolist() == pytest.approx([-0.25, 0.25])
    entropy = math.log(4) - 0.75 * math.log(3)
    _, grad = gradient(logits, 1, None, torch.tensor([1.0]))
    assert grad.tolist() == pytest.approx([-p * (math.log(p) + entropy) for p in (0.25, 0.75)])
    ignored, _ = gradient(logits, 1, torch.tensor([torch.nan]), torch.tensor([1.0]), ~VALID)
    assert ignored.target_coef_N == ignored.prob_coef_N == ignored.entropy_coef_N == 0

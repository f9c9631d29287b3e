from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.vocab_parallel import (
    VocabShard,
    _combine,
    _local_stats,
    logp_and_entropy,
)


def whole(num_valid, chunk_tokens=3):
    return VocabShard(start=0, num_valid=num_valid, group=None, chunk_tokens=chunk_tokens)


def test_two_tokens_by_hand():
    # Logits ln 1, ln 3: probabilities 1/4, 3/4; at temperature 0.5 1/10, 9/10.
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([1.0, 3.0]).log()[:, None]
    target = torch.tensor([1, 0])
    logp, entropy = logp_and_entropy(hidden, weight, target, 1.0, whole(2))
    assert logp.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy[0].item() == pytest.approx(0.562335, abs=1e-6)
    logp, entropy = logp_and_entropy(hidden, weight, target, 0.5, whole(2))
    assert logp.exp().tolist() == pytest.approx([0.9, 0.1])
    assert entropy[1].item() == pytest.approx(0.325083, abs=1e-6)


def test_gradients_of_both_outputs_in_float64():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.tensor([0, 4, 2, 2, 1, 3, 4])

    def run(hidden, weight):
        return logp_and_entropy(hidden, weight, target, 0.7, whole(5))

    assert torch.autograd.gradcheck(run, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[0], (hidden, weight))
    assert torch.autograd.gradcheck(lambda *given: run(*given)[1], (hidden, weight))


def test_padding_rows_never_count():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator)
    weight = torch.randn(8, 4, generator=generator, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4])
    padded = torch.cat([weight[:6], torch.full((2, 4), 1e4)])
    expected = logp_and_entropy(hidden, weight[:6], target, 1.0, whole(6))
    got = logp_and_entropy(hidden, padded, target, 1.0, whole(6))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right)
    logp_and_entropy(hidden, weight, target, 1.0, whole(6))[0].sum().backward()
    assert weight.grad[6:].abs().max() == 0
    assert weight.grad[:6].abs().min() > 0


def test_chunks_do_not_change_values_or_gradients():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, 4, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    target = torch.randint(0, 6, (11,), generator=generator)
    outcomes = []
    for chunk_tokens in (1, 4, 100):
        given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logp, entropy = logp_and_entropy(*given, target, 1.0, whole(6, chunk_tokens))
        (logp.sum() + 0.3 * entropy.square().sum()).backward()
        outcomes.append([logp, entropy, *(value.grad for value in given)])
    for other in outcomes[1:]:
        for left, right in zip(other, outcomes[0], strict=True):
            torch.testing.assert_close(left, right)


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logp, entropy = logp_and_entropy(hidden, weight, torch.tensor([0, 0]), 1.0, whole(3))
    assert logp.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]


def test_stats_of_shards_combine_even_where_one_is_all_padding(monkeypatch):
    class ThreeRanks:
        def size(self):
            return 3

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 7, generator=generator)
    target = torch.tensor([0, 3, 4, 6])
    cuts = ((0, 4), (4, 3), (7, 0))
    parts = [
        _local_stats(
            logits[:, start : start + size],
            target,
            VocabShard(start=start, num_valid=size, group=None),
        )
        for start, size in cuts
    ]
    monkeypatch.setattr(
        torch.distributed,
        "all_gather",
        lambda out, mine, group: [slot.copy_(part) for slot, part in zip(out, parts, strict=True)],
    )
    maximum, total, weighted, target_logit = _combine(parts[0], ThreeRanks())
    logp = logits.log_softmax(-1)
    log_z = maximum + total.log()
    torch.testing.assert_close(target_logit - log_z, logp.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(log_z - weighted / total, -(logp.exp() * logp).sum(-1))


def test_wrong_shapes_and_temperature_are_named():
    hidden, weight, target = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"weight \(3, 5\)"):
        logp_and_entropy(hidden, torch.zeros(3, 5), target, 1.0, whole(3))
    with pytest.raises(ValueError, match=r"target \(1,\)"):
        logp_and_entropy(hidden, weight, target[:1], 1.0, whole(3))
    with pytest.raises(ValueError, match=r"rollout.temperature=0"):
        logp_and_entropy(hidden, weight, target, 0, whole(3))

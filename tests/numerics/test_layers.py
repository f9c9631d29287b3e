"""Operations of a decoder: close to torch's, and independent of what is computed beside them."""

import math

import pytest
import torch
from torch.nn import functional

from mega_agentrl.errors import InputError
from mega_agentrl.numerics import layers

SEED = 0


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + len(shape)))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def causal(num_queries, num_keys):
    last = torch.arange(num_queries)[:, None] + num_keys - num_queries
    return (torch.arange(num_keys) <= last)[None, None]


def test_norm_and_activation_are_torchs():
    hidden, weight = normal(5, 48), normal(48)
    hidden[2] = 0
    close(
        layers.rms_norm(hidden, weight, 1e-6), weight * functional.rms_norm(hidden, (48,), eps=1e-6)
    )
    close(layers.silu(hidden * 10), functional.silu(hidden * 10))


def test_a_token_does_not_depend_on_the_others():
    hidden, weight = normal(33, 48), normal(48)
    for function in (lambda x: layers.rms_norm(x, weight, 1e-6), layers.silu):
        alone = torch.cat([function(row[None]) for row in hidden])
        assert torch.equal(alone, function(hidden))


def test_rotation_turns_pairs_by_their_angles_and_scales_them():
    heads = torch.tensor([[[1.0, 10.0, 0.0, 0.0]]])
    got = layers.rotate(heads, torch.tensor([[math.pi / 2, math.pi]], dtype=torch.float64), 2.0)
    close(got, torch.tensor([[[0.0, -20.0, 2.0, 0.0]]]))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_torchs(groups):
    query, key, value = normal(2, 4, 7, 16), normal(2, groups, 11, 16), normal(2, groups, 11, 16)
    expected = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal(7, 11), enable_gqa=True
    )
    close(layers.attention(query, key, value, causal(7, 11)), expected)


def test_attention_does_not_depend_on_padding_order_or_other_queries():
    query, key, value = normal(2, 4, 7, 16), normal(2, 2, 11, 16), normal(2, 2, 11, 16) * 3
    visible = causal(7, 11)
    expected = layers.attention(query, key, value, visible)
    for number in range(7):
        one = slice(number, number + 1)
        got = layers.attention(query[:, :, one], key, value, visible[:, :, one])
        assert torch.equal(got, expected[:, :, one])
    unused = torch.full((2, 2, 5, 16), 1e6)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(SEED))
    longer = [torch.cat([part, unused], dim=2)[:, :, order] for part in (key, value)]
    mask = functional.pad(visible, (0, 5))[..., order]
    assert torch.equal(layers.attention(query, *longer, mask), expected)


def test_too_many_keys_are_named(monkeypatch):
    monkeypatch.setattr(layers, "MAX_KEYS", 10)
    query = normal(1, 1, 11, 4)
    with pytest.raises(InputError) as caught:
        layers.attention(query, query, query, causal(11, 11))
    assert (caught.value.name, caught.value.got) == ("number of keys", 11)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_torchs(temperature):
    logits = normal(6, 500) * 4
    logp, entropy = layers.log_probs_and_entropy(logits, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logp, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        entropy, torch.special.entr(expected.exp()).sum(-1), rtol=1e-6, atol=1e-7
    )


def test_the_sums_of_two_parts_of_a_vocabulary_add_up():
    logits = normal(6, 500) * 4
    largest = logits.amax(-1).double()
    whole = layers.softmax_sums(logits, largest, 1.0)
    parts = [layers.softmax_sums(part, largest, 1.0) for part in logits.split([123, 377], dim=1)]
    for name in ("exponentials_N", "weighted_N"):
        assert torch.equal(sum(getattr(part, name) for part in parts), getattr(whole, name))

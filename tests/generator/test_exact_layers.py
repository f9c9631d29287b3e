"""Attention and linear layers that replace vLLM's, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("vllm")

from mega_agentrl.generator import exact_layers
from mega_agentrl.numerics import layers

HEADS, GROUPS, WIDTH, BLOCK = 4, 2, 8, 32


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_attention_over_scattered_blocks_is_that_over_one_sequence():
    lengths, num_queries = [40, 1, 70, 33], [5, 1, 1, 33]
    block_table = torch.tensor([[3, 9, 0], [1, 0, 0], [8, 2, 6], [5, 7, 0]], dtype=torch.int32)
    kv_cache = torch.full((10, GROUPS, BLOCK, 2 * WIDTH), 7.0)
    expected, queries = [], []
    for row, (length, count) in enumerate(zip(lengths, num_queries, strict=True)):
        key, value = normal(length, GROUPS, WIDTH) + row, normal(length, GROUPS, WIDTH).exp()
        token = torch.arange(length)
        slots = block_table[row].long()[token // BLOCK] * BLOCK + token % BLOCK
        exact_layers._store_keys_and_values(None, None, key, value, kv_cache, slots)
        query = normal(count, HEADS, WIDTH) - row
        visible = token <= torch.arange(length - count, length)[:, None]
        by_head = (part.transpose(0, 1)[None] for part in (query, key, value))
        expected.append(layers.attention(*by_head, visible[None, None])[0].transpose(0, 1))
        queries.append(query)
    starts = torch.tensor([0, *torch.tensor(num_queries).cumsum(0).tolist()])
    metadata = SimpleNamespace(
        query_start_loc=starts, seq_lens=torch.tensor(lengths), block_table=block_table
    )
    output = torch.zeros(sum(num_queries), HEADS, WIDTH)
    exact_layers._forward_attention(
        None, None, torch.cat(queries), None, None, kv_cache, metadata, output
    )
    assert torch.equal(output, torch.cat(expected))


def test_a_linear_layer_uses_its_new_weight_after_an_update():
    layer = SimpleNamespace(weight=normal(6, 16))
    x, bias = normal(3, 16), normal(6)
    for scale in (1, -2):
        layer.weight = layer.weight * scale
        exact_layers._drop_packed_weight(None, layer)
        for _ in range(2):  # the second pass finds the packed weight
            got = exact_layers._apply_linear(None, layer, x, bias)
            torch.testing.assert_close(got, functional.linear(x, layer.weight, bias))


def test_a_norm_adds_the_residual_first():
    norm = SimpleNamespace(weight=normal(16), variance_epsilon=1e-6)
    x, residual = normal(3, 16), normal(3, 16) * 2
    normed, total = exact_layers._forward_norm(norm, x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, exact_layers._forward_norm(norm, total))

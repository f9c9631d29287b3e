"""Packed attention against plain attention: both kernels, forks, context ranks, gradients."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest
import torch

from mega_agentrl.actor.model import packed_attention as attention
from mega_agentrl.actor.model.attention_plan import Branch
from mega_agentrl.actor.model.packed_attention import packed_attention
from mega_agentrl.actor.parallel.context_parallel import rank_token_indices
from tests.actor.gloo_ranks import run_ranks
from tests.tree_batches import paths_of, single_branches, tree_params

# Of very different length, so that there are several blocks; multiples of 4 for two ranks.
STARTS = (0, 8, 12, 212, 220, 340, 344)
SINGLE = single_branches(STARTS)
# The same tokens, with a fork in the long trees, one of a fork, and one right at the root.
FORKED = (
    *SINGLE[:2],
    Branch(start=12, stop=100, path=()),
    Branch(start=100, stop=150, path=((12, 90),)),
    Branch(start=150, stop=160, path=((12, 90), (100, 101))),
    Branch(start=160, stop=212, path=((12, 13),)),
    SINGLE[3],
    Branch(start=220, stop=221, path=()),
    Branch(start=221, stop=340, path=((220, 221),)),
    SINGLE[5],
)
both_shapes = pytest.mark.parametrize("branches", [SINGLE, FORKED], ids=["rows", "trees"])


def inputs(starts=STARTS, heads=4, kv_heads=2, width=8):
    """Return query, key, value and a gradient of the output, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, width)]
    parts = [torch.randn(starts[-1], 1, *shape, generator=generator) for shape in shapes]
    return parts, torch.randn(starts[-1], 1, heads * width, generator=generator)


def masked_attention(query, key, value, branches, scale):
    """Compute plain attention with a mask of what is on a token's path."""
    visible = torch.zeros(len(query), len(query), dtype=torch.bool)
    for token, path in enumerate(paths_of(branches)):
        visible[token, path] = True
    q, k, v = (part[:, 0].transpose(0, 1) for part in (query, key, value))
    k, v = (part.repeat_interleave(q.size(0) // k.size(0), dim=0) for part in (k, v))
    weights = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(len(query), 1, -1)


def run(compute, parts, grad):
    """Return the output and the gradients of the inputs."""
    leaves = [part.clone().requires_grad_() for part in parts]
    out = compute(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def expected(branches, scale=8**-0.5):
    parts, grad = inputs()
    return run(lambda q, k, v: masked_attention(q, k, v, branches, scale), parts, grad)


def varlen_by_rows(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Compute what torch's GPU kernel does: per segment, with a bottom-right causal mask."""
    assert window_size == (-1, 0)
    assert enable_gqa == (query.size(1) != key.size(1))
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    outs = []
    for n in range(len(cu_q) - 1):
        q = query[cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        k, v = (part[cu_k[n] : cu_k[n + 1]].transpose(0, 1) for part in (key, value))
        ahead = k.size(1) - q.size(1)
        mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(diagonal=ahead)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(outs)


def varlen_of_torch_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """Compute the same without grouped queries."""
    arguments = {"scale": scale, "window_size": window_size, "enable_gqa": False}
    return varlen_by_rows(query, key, value, cu_q, cu_k, max_q, max_k, **arguments)


@both_shapes
@pytest.mark.parametrize("scale", [None, 0.1])
def test_a_token_attends_to_its_path(scale, branches):
    parts, grad = inputs()
    trees = tree_params(STARTS, branches)
    assert len(trees.padded_plan.blocks) > 1
    got = run(lambda q, k, v: packed_attention(q, k, v, trees, scale), parts, grad)
    torch.testing.assert_close(got, expected(branches, scale or 8**-0.5))


@both_shapes
@pytest.mark.parametrize("kernel", [varlen_by_rows, varlen_of_torch_2_11])
def test_segments_by_boundaries_give_the_same(kernel, branches, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "supports_varlen_attention", lambda *_: True)
    parts, grad = inputs()
    trees = tree_params(STARTS, branches)
    got = run(lambda q, k, v: packed_attention(q, k, v, trees), parts, grad)
    torch.testing.assert_close(got, expected(branches))


@pytest.mark.parametrize("is_varlen", [False, True])
def test_keys_gathered_along_paths_are_not_kept(is_varlen, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_rows)
    monkeypatch.setattr(attention, "supports_varlen_attention", lambda *_: is_varlen)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    # A chain of ten tokens and forty branches of one: ten times as many keys as tokens.
    branches = [Branch(start=0, stop=10, path=())]
    branches += [Branch(start=w, stop=w + 1, path=((0, 10),)) for w in range(10, 50)]
    parts, _ = inputs((0, 50), heads=2)
    leaves = [part.requires_grad_() for part in parts]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_attention(*leaves, tree_params((0, 50), branches))
    one = 50 * 2 * 8 * 4
    assert sum(kept.values()) < 12 * one


def test_keys_and_values_are_released_with_the_backward_pass():
    branches = (Branch(start=0, stop=40, path=()), Branch(start=40, stop=50, path=((0, 8),)))
    gc.disable()
    try:
        leaves = [torch.randn(50, 1, 2, 8, requires_grad=True) for _ in range(3)]
        query, key, value = (2 * leaf for leaf in leaves)
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in (key, value)]
        packed_attention(query, key, value, tree_params((0, 50), branches)).sum().backward()
        del query, key, value
        assert all(storage() is None for storage in storages)
    finally:
        gc.enable()


def test_layers_and_equal_segments_share_one_bias():
    # Three branches of two tokens leave the end of a chain, which needs no mask.
    branches = [Branch(start=0, stop=400, path=())]
    branches += [Branch(start=w, stop=w + 2, path=((0, 400),)) for w in (400, 402, 404)]
    trees = tree_params((0, 406), branches)
    forks, chain = trees.padded_biases(torch.float32)
    assert chain is None
    assert forks.shape == (3, 1, 2, 402)
    assert forks.untyped_storage().nbytes() == 2 * 402 * 4
    assert torch.nonzero(forks[2, 0] < 0).tolist() == [[0, 401]]
    assert trees.padded_biases(torch.float32)[0] is forks


def share_of_context(rank, group, branches):
    """Return output and gradients of this context rank's tokens, from both plans."""
    size = group.size()
    held = rank_token_indices(STARTS, rank, size)
    parts, grad = inputs()
    trees = tree_params(STARTS, branches, context_rank=rank, context_size=size)

    def compute(q, k, v):
        return packed_attention(q, k, v, trees, context_group=group)

    blocks = run(compute, [part[held] for part in parts], grad[held])
    with patch.multiple(
        attention, varlen_attn=varlen_by_rows, supports_varlen_attention=lambda *_: True
    ):
        return blocks, run(compute, [part[held] for part in parts], grad[held])


@both_shapes
def test_two_context_ranks_equal_one(rank_pool, branches):
    held = torch.cat([rank_token_indices(STARTS, rank, 2) for rank in range(2)])
    shares = run_ranks(rank_pool, share_of_context, 2, branches)
    for kernel in zip(*shares, strict=True):
        for whole, *parts in zip(expected(branches), *kernel, strict=True):
            torch.testing.assert_close(torch.cat(parts), whole[held])


def test_transformer_engine_receives_whole_rows_without_gaps():
    # Rows of 4 and 8 on rank 1 of 2, which holds 6 of the 12 tokens.
    rows = tree_params((0, 4, 12), context_rank=1, context_size=2)
    # Megatron's layers see one sequence; only the engine's own attention sees rows.
    assert rows.qkv_format == "sbhd"
    assert rows.cu_seqlens_q.tolist() == [0, 4, 12]
    assert rows.cu_seqlens_q.dtype == torch.int32
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(rows, name) is rows.cu_seqlens_q
    assert rows.max_seqlen_q == rows.max_seqlen_kv == 8
    # Set, they would make Megatron choose another context group on every call.
    assert rows.cp_group is None
    assert rows.local_cp_size is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@both_shapes
@pytest.mark.parametrize("rank", [0, 1])
def test_the_gpu_kernel_and_the_blocks_agree(rank, branches):
    # The plans of one of two context ranks: segments with more keys than queries.
    held = rank_token_indices(STARTS, rank, 2)
    (query, key, value), grad = inputs(width=64)
    order = torch.cat([rank_token_indices(STARTS, other, 2) for other in range(2)])
    parts = [query[held, 0], key[order, 0], value[order, 0]]
    trees = tree_params(STARTS, branches, context_rank=rank, context_size=2, device="cuda")
    results = []
    for compute, dtype in (
        (attention._varlen_attention, torch.bfloat16),
        (attention._padded_attention, torch.float32),
    ):
        leaves = [part.to("cuda", dtype).requires_grad_() for part in parts]
        out = compute(*leaves, trees, None)
        out.backward(grad[held].to("cuda", dtype).view_as(out))
        results.append([out.float(), *(leaf.grad.float() for leaf in leaves)])
    is_supported = attention.supports_varlen_attention
    assert is_supported(leaves[0].device, torch.bfloat16, leaves[0].size(-1))
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)

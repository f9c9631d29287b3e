"""Checks of the Triton kernels for packed trees, on any device, against attention without blocks.

A check takes a device and a dtype and asserts; `CHECKS` lists them.
``python tree_attention_cases.py DTYPE CHECK ...`` runs some on the CPU in a process of its own,
where Triton's interpreter can be chosen. It does without Megatron, which takes long to import.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch

from mega_agentrl.actor.model.attention_plan import (
    BlockSparseAttentionPlan,
    Branch,
    make_block_sparse_plan,
)
from mega_agentrl.actor.model.tree_attention import tree_attention
from mega_agentrl.actor.parallel.context_parallel import gathered_token_indices, rank_token_indices

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Two trees of which the second forks after its first 128 tokens.
STARTS, TRUNK, LEFT, RIGHT = (0, 128, 512), slice(128, 256), slice(256, 384), slice(384, 512)
FORK = (
    Branch(start=0, stop=128, path=()),
    Branch(start=128, stop=256, path=()),
    Branch(start=256, stop=384, path=((128, 256),)),
    Branch(start=384, stop=512, path=((128, 256),)),
)


def random_trees(seed, multiple=1):
    """Return starts and branches: single tokens, forks of forks, and padding as the last tree."""
    draw = random.Random(seed)
    starts, branches, stop = [], [], 0
    for _ in range(draw.randint(1, 3)):
        starts.append(stop)
        path = []
        for number in range(draw.randint(1, 6)):
            tokens = [token for run in path for token in range(*run)]
            shared = draw.randint(1, len(tokens)) if number else 0
            runs, left = [], shared
            for first, last in path:
                if left > 0:
                    runs.append((first, min(last, first + left)))
                left -= last - first
            start, stop = stop, stop + draw.choice([1, 2, 17, 64, 150])
            branches.append(Branch(start=start, stop=stop, path=tuple(runs)))
            path = [*runs, (start, stop)]
        padding = -(stop - starts[-1]) % multiple
        last = branches.pop()
        stop += padding
        branches.append(Branch(start=last.start, stop=stop, path=last.path))
    starts.append(stop)
    branches.append(Branch(start=stop, stop=stop + 3 * multiple, path=()))
    return (*starts, stop + 3 * multiple), tuple(branches)


@dataclass(frozen=True, slots=True)
class Trees:
    """What the kernels need of a micro-batch, and which keys each token attends to."""

    block_sparse_plan: BlockSparseAttentionPlan
    visible_WW: torch.Tensor


def make_trees(starts, branches, *, rank=0, size=1, device="cpu"):
    """Return the trees of a context rank."""
    visible_WW = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for branch in branches:
        for token in range(branch.start, branch.stop):
            for first, stop in (*branch.path, (branch.start, token + 1)):
                visible_WW[token, first:stop] = True
    plan = make_block_sparse_plan(starts, branches, rank, size, torch.device(device))
    return Trees(plan, visible_WW)


def dense_attention(query_WHD, key_WHD, value_WHD, trees, scale):
    """Return the attention of all tokens to all tokens of their paths, from the formula."""
    group = query_WHD.size(1) // key_WHD.size(1)
    key_WHD, value_WHD = (part.repeat_interleave(group, dim=1) for part in (key_WHD, value_WHD))
    scale = query_WHD.size(2) ** -0.5 if scale is None else scale
    score_HWW = scale * torch.einsum("qhd,khd->hqk", query_WHD, key_WHD)
    weight_HWW = score_HWW.masked_fill(~trees.visible_WW, -torch.inf).softmax(2)
    return torch.einsum("hqk,khd->qhd", weight_HWW, value_WHD)


def given(num_tokens, heads, kv_heads, width, dtype):
    """Return query, key, value and a gradient of the output, rounded to the dtype."""
    generator = torch.Generator().manual_seed(num_tokens + heads + width)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, width), (heads, width)]
    parts = [torch.randn(num_tokens, *shape, generator=generator) for shape in shapes]
    return [part.to(dtype).float() for part in parts]


def run(compute, parts, trees, device, dtype, scale=None):
    """Return the output and the gradients of the inputs, on the CPU."""
    *inputs, grad = (part.to(device, dtype, copy=True) for part in parts)
    query, key, value = (part.requires_grad_() for part in inputs)
    # As from a fused linear layer: only the last dim is contiguous.
    key_view, value_view = torch.stack([key, value], dim=2).unbind(2)
    out = compute(query, key_view, value_view, trees, scale)
    out.backward(grad)
    return [part.detach().float().cpu() for part in (out, query.grad, key.grad, value.grad)]


def assert_close(got, expected, bound):
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def check_small_trees(device, dtype):
    """Trees of one or two blocks."""
    _check_random_trees(device, dtype, seed=1, heads=2, kv_heads=1, width=64)  # 135 tokens
    _check_random_trees(device, dtype, seed=4, heads=2, kv_heads=2, width=128)  # 69 in 4 branches


def check_large_trees(device, dtype):
    """Trees of up to four blocks."""
    for seed, heads, kv_heads, width in (
        (1, 4, 1, 128),  # 135 tokens in 6 branches
        (2, 2, 1, 64),  # 4 in 2
        (5, 2, 1, 64),  # 391 in 16
        (6, 1, 1, 128),  # 366 in 9
        (8, 4, 2, 64),  # 70 in 4
    ):
        _check_random_trees(device, dtype, seed, heads, kv_heads, width)


def _check_random_trees(device, dtype, seed, heads, kv_heads, width):
    starts, branches = random_trees(seed)
    parts = given(starts[-1], heads, kv_heads, width, dtype)
    scale = 0.2 if seed % 2 else None
    trees = make_trees(starts, branches, device=device)
    got = run(tree_attention, parts, trees, device, dtype, scale)
    expected = run(dense_attention, parts, trees, "cpu", torch.float32, scale)
    for left, right in zip(got, expected, strict=True):
        assert_close(left, right, TOLERANCE[dtype])


def check_masked_blocks_are_not_loaded(device, dtype):
    trees = make_trees(STARTS, FORK, device=device)
    parts = given(STARTS[-1], 1, 1, 64, dtype)
    clean = run(tree_attention, parts, trees, device, dtype)
    query, key, value, grad = (part.clone() for part in parts)
    for hidden in (slice(0, 128), LEFT):
        key[hidden] = value[hidden] = torch.nan
    got = run(tree_attention, [*parts[:1], key, value, parts[3]], trees, device, dtype)
    for name, place in (("output", 0), ("gradient of the queries", 1)):
        for seen in (TRUNK, RIGHT):
            assert torch.equal(got[place][seen], clean[place][seen]), name
    assert got[0][LEFT].isnan().all()
    query[RIGHT] = grad[RIGHT] = torch.nan
    got = run(tree_attention, [query, *parts[1:3], grad], trees, device, dtype)
    for place in (2, 3):
        for seen in (slice(0, 128), LEFT):
            assert torch.equal(got[place][seen], clean[place][seen]), "gradient of keys and values"
        assert got[place][TRUNK].isnan().all()


def check_equal_inputs_give_equal_bits(device, dtype):
    starts, branches = random_trees(9)
    parts = given(starts[-1], 2, 1, 64, dtype)
    trees = make_trees(starts, branches, device=device)
    first, second = (run(tree_attention, parts, trees, device, dtype) for _ in range(2))
    assert all(map(torch.equal, first, second))


def check_context_ranks(device, dtype):
    starts, branches = random_trees(11, multiple=4)
    parts = given(starts[-1], 2, 1, 64, dtype)
    whole = run(dense_attention, parts, make_trees(starts, branches), "cpu", torch.float32)
    order_W = torch.cat([rank_token_indices(starts, rank, 2) for rank in range(2)])
    gathered_W = gathered_token_indices(starts, 2)
    shares = []
    for rank in range(2):
        held_S = rank_token_indices(starts, rank, 2)
        query, key, value, grad = parts
        trees = make_trees(starts, branches, rank=rank, size=2, device=device)
        own = [query[held_S], key[order_W], value[order_W], grad[held_S]]
        shares.append(run(tree_attention, own, trees, device, dtype))
    for place, expected in enumerate(whole):
        got = [share[place] for share in shares]
        total = torch.cat(got) if place < 2 else got[0] + got[1]
        assert_close(total[gathered_W], expected, TOLERANCE[dtype])


CHECKS = (
    check_small_trees,
    check_large_trees,
    check_masked_blocks_are_not_loaded,
    check_equal_inputs_give_equal_bits,
    check_context_ranks,
)


def main() -> None:
    torch.set_num_threads(1)
    dtype, *names = sys.argv[1:]
    for name in names:
        globals()[name]("cpu", getattr(torch, dtype))


if __name__ == "__main__":
    main()

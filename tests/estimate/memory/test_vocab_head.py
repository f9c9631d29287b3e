"""The head's workspace against what the kernels allocate."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.vocab import tiling as vocab_tiles
from mega_agentrl.actor.vocab import torch_kernel as vocab_torch
from mega_agentrl.estimate.memory.activations import KernelConfig
from mega_agentrl.estimate.memory.vocab_head import SCRATCH_BYTES, _tile_size, head_workspace_bytes
from tests.estimate.shapes import released


def test_the_bounds_are_the_kernels_own():
    bounds = vocab_tiles.SCRATCH_BYTES
    assert {True: bounds["cuda"], False: bounds["cpu"]} == SCRATCH_BYTES


def test_the_triton_kernels_sizes():
    vocab_triton = pytest.importorskip("mega_agentrl.actor.vocab.triton_kernel")
    hidden_ND = torch.empty(20_000, 8, dtype=torch.bfloat16)
    rows = 18_992
    step = vocab_triton.chunk_tokens(hidden_ND, rows, SCRATCH_BYTES[True])
    block, scratch = _tile_size(rows, 20_000, KernelConfig())
    assert scratch == min(step, 20_000) * block * 2
    assert scratch <= SCRATCH_BYTES[True]
    assert block <= rows


@pytest.mark.parametrize(("rows", "tokens"), [(50_000, 4096), (61, 30), (61, 500_000)])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_the_torch_kernels_sizes(rows, tokens, item_bytes):
    dtype = torch.bfloat16 if item_bytes == 2 else torch.float32
    scratch = vocab_torch._TileScratch(
        torch.empty(tokens, 1, dtype=dtype), rows, SCRATCH_BYTES[False]
    )
    kernels = KernelConfig(item_bytes=item_bytes, fused=False)
    block, num_bytes = _tile_size(rows, tokens, kernels)
    assert num_bytes == scratch._buffer.numel() * 4
    assert block == max(part.stop - part.start for part in scratch.blocks)


def test_far_less_than_whole_logits():
    shape, tokens = released("qwen3-32b"), 16384
    logits = tokens * shape.vocab_size // 4 * 4
    assert head_workspace_bytes(shape, 4, tokens, KernelConfig()) < 1.1 * logits
    assert (
        head_workspace_bytes(shape, 4, 2 * tokens, KernelConfig())
        - head_workspace_bytes(shape, 4, tokens, KernelConfig())
        == tokens * shape.hidden_size * 6
    ), "only the hidden states' gradient grows with the tokens"
